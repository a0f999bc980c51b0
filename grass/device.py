"""Whatever accelerator there is: CUDA, ROCm, XPU, MPS or any other that torch knows. Its streams and events, its name.

The CPU has no streams: work on it is done when the call returns. MPS has no pinned memory and no streams beside its
own, so Grass does not copy to it or from it in the background: offload and streaming refuse it, and the bank's exchange
runs within the step. No other module of ``grass`` asks which accelerator it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WITHOUT_STREAMS = ("cpu", "meta", "mps")
VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "xpu": ("ZE_AFFINITY_MASK",)}
"""Variables that choose and renumber the devices of a process. On ROCm torch calls the devices ``cuda`` too."""


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued on streams, which events order, and its host memory can be pinned."""
    return device.type not in WITHOUT_STREAMS


def accelerator() -> torch.device:
    """The accelerator of this machine, without an index; the CPU if there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def is_available(device: torch.device) -> bool:
    """Whether a device is the CPU or of this machine's accelerator."""
    return device.type == "cpu" or device.type == accelerator().type


def current_stream(device: torch.device) -> torch.Stream:
    """The stream of a device that this thread queues work on."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Another stream of a device."""
    return torch.Stream(device)


def record_event(stream: torch.Stream) -> torch.Event:
    """The point in a stream behind all work that is queued on it now."""
    event: torch.Event = stream.record_event()
    return event


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Queue work on a stream, and make its device the current one.

    Several threads may do so with one stream at the same time, unlike with ``with stream:``.
    """
    index = torch.accelerator.current_device_index()
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def synchronize(device: torch.device) -> None:
    """Wait until all work on a device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Bytes of a device that are free."""
    return int(torch.accelerator.get_memory_info(device)[0])


def total_bytes(device: torch.device) -> int:
    """Bytes of a device's memory; of the CPU, of this machine's. 0 where the system does not say."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[1])
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    return math.prod(os.sysconf(name) for name in names) if set(names) <= os.sysconf_names.keys() else 0


def name_of(device: torch.device) -> str:
    """A device's name, such as ``"NVIDIA H100"``; its type where torch does not say."""
    name = _asked(device, "get_device_name")
    return device.type if name is None else str(name)


def capability(device: torch.device) -> tuple[int, int]:
    """What a CUDA or ROCm device can do, as ``(9, 0)``; ``(0, 0)`` for others."""
    found = _asked(device, "get_device_capability")
    return found if isinstance(found, tuple) else (0, 0)


def pci_address(device: torch.device) -> str | None:
    """Where on its bus a device is, such as ``"0000:4b:00.0"``; ``None`` where torch does not say."""
    card = _asked(device, "get_device_properties")
    numbers = [getattr(card, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    found = [f"{number:02x}" for number in numbers if number is not None]
    return f"{found[0]:0>4}:{found[1]}:{found[2]}.0" if len(found) == len(numbers) else None


def number_on_machine(device: torch.device) -> str:
    """What the machine calls a device that variables such as ``CUDA_VISIBLE_DEVICES`` renumber in this process."""
    index = device.index or 0
    for variable in VISIBLE.get(device.type, ()):
        if visible := os.environ.get(variable):
            return visible.split(",")[index].strip()
    return str(index)


def _asked(device: torch.device, function: str) -> Any:
    """What a function of ``torch.cuda``, ``torch.xpu``, ... says of a device; ``None`` where there is no such one."""
    ask = None if device.type == "cpu" else getattr(getattr(torch, device.type, None), function, None)
    return None if ask is None else ask(device)
