"""Streams and events of whatever accelerator there is: CUDA, ROCm, XPU, or any other that torch knows.

The CPU has none: work on it is done when the call returns. MPS has no pinned memory and no streams beside its own, so
Grass does not copy to it or from it in the background.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WITHOUT_STREAMS = ("cpu", "meta", "mps")


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


def name_of(device: torch.device) -> str:
    """A device's name, such as ``"NVIDIA H100"``; its type where torch does not say."""
    module: Any = getattr(torch, device.type, None)
    get = getattr(module, "get_device_name", None)
    return device.type if device.type == "cpu" or get is None else str(get(device))
