"""The devices of a sweep, each of which has one trial at a time."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

import torch

from grass.device import number_on_machine
from grass.memory.units import format_bytes, parse_bytes
from grass.offload.host_storage import free_memory


def checked_devices(devices: Sequence[str] | None) -> list[str]:
    """The names of the devices, by default of every accelerator, or the CPU.

    A CPU has as many places as there are names: ``"cpu:0"``, ``"cpu:1"`` and so on.

    Raises:
        ValueError: no device, one twice, or one that is not there.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind else 0
    if devices is None:
        return [f"{kind}:{i}" for i in range(count)] if kind else ["cpu"]
    if isinstance(devices, str) or not devices:
        raise ValueError(f"Invalid devices={devices!r}: must be a list of names, such as ['cuda:0', 'cuda:1']")
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            device = torch.device("meta")
        if device.type != "cpu" and not (kind and device.type == kind.type and (device.index or 0) < count):
            here = "".join(f", {kind}:{i}" for i in range(count))
            raise ValueError(f"Unknown device {name!r}: this machine has cpu:N{here}")
    if len({claim_name(name) for name in devices}) < len(devices):
        raise ValueError(f"Invalid devices={list(devices)!r}: a name is there twice")
    return list(devices)


def check_host_memory(of_each: int | str, at_a_time: int) -> None:
    """Refuse more trials at a time than the free host memory holds.

    Args:
        of_each: bytes that a trial takes, or a text such as ``"57GB"``.
        at_a_time: trials.

    Raises:
        MemoryError: they do not fit; says how many do.
        ValueError: an invalid size.
    """
    if isinstance(of_each, bool) or not isinstance(of_each, (int, str)) or (isinstance(of_each, int) and of_each < 1):
        raise ValueError(f"Invalid host={of_each!r}: must be a number of bytes >= 1, or a text such as '57GB'")
    nbytes = parse_bytes(of_each) if isinstance(of_each, str) else of_each
    free = free_memory()
    if free is not None and at_a_time * nbytes > free:
        raise MemoryError(
            f"{at_a_time} trials at a time take {format_bytes(at_a_time * nbytes)} of host memory, and "
            f"{format_bytes(free)} are free: {free // nbytes} fit. Give the sweep so many devices"
        )


def claim_name(name: str) -> str:
    """What two commands call the same device of the same machine: the name of a file."""
    device = torch.device(name)
    return re.sub(r"[^-.\w]", "_", f"{socket.gethostname()}-{device.type}-{number_on_machine(device)}")
