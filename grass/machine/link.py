"""Copies between a device and host memory, one direction a thread.

A copy is done when the call returns. Copies overlap where each direction has a thread of its own.
Bytes are counted. With a CPU as the device, the link is a stand-in: it
copies within host memory and sleeps until a link of the given rate would be done.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from grass.device import current_stream, has_streams, is_available, record_event
from grass.kernels.layout import is_dense
from grass.machine.pinned_buffers import PinnedBuffers

PIECE = 1 << 20
"""Bytes that a stand-in copies between two looks at the clock."""
MOST_CREDIT = 0.05
"""Seconds of being late that a stand-in makes up for at most."""


class Link:
    """A link between one device and host memory.

    At most one thread may copy in each direction at a time.

    Args:
        device: the device.
        bytes_per_second: rate of each direction, only for a CPU; ``None``: as fast as memory is.
        slab_bytes: pinned host memory, allocated here and used by all copies. A copy goes in pieces of an eighth of it,
            of which several are on their way at the same time. A CPU needs none.

    Attributes:
        bytes_down: bytes copied from the device so far.
        bytes_up: bytes copied to the device so far.

    Raises:
        ValueError: the device is neither a CPU nor an accelerator with streams, or a number is out of range.
    """

    def __init__(
        self, device: torch.device | str, bytes_per_second: float | None = None, slab_bytes: int = 64 << 20
    ) -> None:
        if not _can_copy(torch.device(device)):
            raise ValueError(f"Invalid device={str(device)!r}. Must be a CPU or an accelerator with streams.")
        self.device = _as_of_tensors(torch.device(device))
        if bytes_per_second is not None and (self.device.type != "cpu" or not bytes_per_second > 0):
            raise ValueError(f"Invalid {bytes_per_second=}. Must be > 0 and for a CPU, or None.")
        self.bytes_per_second, self.slab_bytes = bytes_per_second, slab_bytes
        self.bytes_down = self.bytes_up = 0
        self._pinned = PinnedBuffers(self.device, slab_bytes) if has_streams(self.device) else None
        self._down, self._up = _Pace(bytes_per_second), _Pace(bytes_per_second)

    def mark(self) -> torch.Event | None:
        """A point in the caller's current stream that a copy can wait for; ``None`` on a CPU, which has no streams.

        Take it where the copy is queued: the copy may run in another thread, long after.
        """
        return record_event(current_stream(self.device)) if has_streams(self.device) else None

    def down(self, source: Tensor, out: Tensor, after: torch.Event | None = None) -> None:
        """Copy from the device to the host. Both tensors must live until this returns.

        Args:
            source: on the device.
            out: in host memory; of the same shape, dtype and layout.
            after: :meth:`mark` of the work that writes ``source``; ``None`` if that work is done.

        Raises:
            ValueError: device, shape, dtype or layout is wrong.
        """
        start = time.perf_counter()
        self._check(source, out, "source", "out")
        if self._pinned is not None:
            self._pinned.down(_bytes_of(source), _bytes_of(out), after)
        else:
            self._down.copy(_bytes_of(source), _bytes_of(out), start)
        self.bytes_down += source.nbytes

    def peek(self, source: Tensor, after: torch.Event | None = None) -> Tensor:
        """A few values of the device in host memory. They take the way :meth:`down`, but do not count as bytes of it.

        Args:
            source: on the device.
            after: as in :meth:`down`.
        """
        if self._pinned is None:
            return source
        out = torch.empty_like(source, device="cpu")
        self._pinned.down(_bytes_of(source), _bytes_of(out), after)
        return out

    def up(self, source: Tensor, out: Tensor, after: torch.Event | None = None) -> None:
        """Copy from the host to the device. Both tensors must live until this returns.

        Args:
            source: in host memory.
            out: on the device; of the same shape, dtype and layout.
            after: :meth:`mark` of the work that still reads ``out``, or of its allocation, because the allocator gives
                out memory that earlier work still reads. ``None`` if that work is done.

        Raises:
            ValueError: device, shape, dtype or layout is wrong.
        """
        start = time.perf_counter()
        self._check(out, source, "out", "source")
        if self._pinned is not None:
            self._pinned.up(_bytes_of(source), _bytes_of(out), after)
        else:
            self._up.copy(_bytes_of(source), _bytes_of(out), start)
        self.bytes_up += source.nbytes

    def _check(self, on_device: Tensor, on_host: Tensor, device_name: str, host_name: str) -> None:
        if on_device.device != self.device:
            raise ValueError(f"{device_name} must be on {self.device}, is on {on_device.device}")
        if on_host.device.type != "cpu":
            raise ValueError(f"{host_name} must be in host memory, is on {on_host.device}")
        if (on_device.shape, on_device.dtype) != (on_host.shape, on_host.dtype):
            raise ValueError(
                f"{device_name} and {host_name} must have the same shape and dtype, are {tuple(on_device.shape)} of "
                f"{on_device.dtype} and {tuple(on_host.shape)} of {on_host.dtype}"
            )
        both_contiguous = on_device.is_contiguous() and on_host.is_contiguous()
        if not both_contiguous and on_device.stride() != on_host.stride():
            raise ValueError(
                f"{device_name} and {host_name} must have the same layout, have strides {on_device.stride()} and "
                f"{on_host.stride()}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and unpickled links have streams and buffers of their own, and count from 0."""
        return Link, (self.device, self.bytes_per_second, self.slab_bytes)


class _Pace:
    """One direction of a stand-in: copies take as long as at a given rate, mostly asleep.

    A sleep ends late by some 0.1 ms. That is credit for the next copies, so many small ones keep the right rate too.
    Time without a copy uses credit up: a link that rests does not become faster.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._credit = 0.0
        self._last = 0.0

    def copy(self, source: Tensor, out: Tensor, now: float) -> None:
        """Copy bytes, ``(n,)`` to ``(n,)``; the call for it came at the time ``now``."""
        self._credit = max(0.0, self._credit - (now - self._last))
        for start in range(0, source.numel(), PIECE):
            piece = slice(start, start + PIECE)
            # NumPy: copies in this thread, where torch would wake one per core
            out[piece].numpy()[:] = source[piece].numpy()
            if self.bytes_per_second is not None:
                now = self._sleep(now, source[piece].numel() / self.bytes_per_second)
        self._last = time.perf_counter()

    def _sleep(self, start: float, seconds: float) -> float:
        """Sleep until ``seconds`` after ``start``, less the credit; return the time."""
        rest = start + seconds - self._credit - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        now = time.perf_counter()
        self._credit = min(MOST_CREDIT, now - start - seconds + self._credit)
        return now


def _can_copy(device: torch.device) -> bool:
    return device.type == "cpu" or (has_streams(device) and is_available(device))


def _as_of_tensors(device: torch.device) -> torch.device:
    """The device as tensors name it: accelerators with an index, the CPU without."""
    return torch.device("cpu") if device.type == "cpu" else torch.empty(0, device=device).device


def _bytes_of(tensor: Tensor) -> Tensor:
    """All values as bytes, ``(nbytes,)``, in the order in which they are in memory.

    Raises:
        ValueError: there are gaps between the values, or some share memory.
    """
    tensor = tensor.detach()
    if not is_dense(tensor):
        shape = tuple(tensor.shape)
        raise ValueError(f"A copy needs tensors without gaps, got shape {shape} with strides {tensor.stride()}")
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    in_order = tensor if tensor.is_contiguous() else tensor.permute(order)
    return in_order.view(-1).view(torch.uint8)
