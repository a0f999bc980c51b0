"""Copies between an accelerator and pageable host memory, through a ring of pinned buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from grass.device import new_stream, on, record_event

SLOTS = 4
"""Buffers of each direction: while some are on their way, the thread fills or empties another."""
ALIGNMENT = 512
"""Bytes that the size of a buffer is a multiple of."""


class PinnedBuffers:
    """Two streams and two rings of pinned buffers, made once: pinning takes long and stops other calls of the device.

    Args:
        device: the accelerator.
        slab_bytes: pinned memory for both directions, half each.

    Raises:
        ValueError: the slab is too small.
    """

    def __init__(self, device: torch.device, slab_bytes: int) -> None:
        size = slab_bytes // (2 * SLOTS) // ALIGNMENT * ALIGNMENT
        if size <= 0:
            raise ValueError(f"Invalid {slab_bytes=}. Must be >= {2 * SLOTS * ALIGNMENT}.")
        slots = torch.split(_pinned(2 * SLOTS * size), size)
        self._size = size
        self._down, self._up = slots[:SLOTS], slots[SLOTS:]
        self._down_stream, self._up_stream = new_stream(device), new_stream(device)

    def down(self, source: Tensor, out: Tensor, after: torch.Event | None) -> None:
        """Copy bytes, ``(n,)`` to ``(n,)``: up to ``SLOTS`` pieces ahead into pinned buffers, from there to ``out``."""
        sources, outs = torch.split(source, self._size), torch.split(out, self._size)
        events: list[torch.Event] = []
        if after is not None:
            self._down_stream.wait_event(after)
        for i, target in enumerate(outs):
            while len(events) < min(i + SLOTS, len(sources)):  # buffers of pieces before `i` are free again
                piece = sources[len(events)]
                slot = self._down[len(events) % SLOTS][: piece.numel()]
                events.append(_start(self._down_stream, piece, slot))
            events[i].synchronize()
            target.copy_(self._down[i % SLOTS][: target.numel()])

    def up(self, source: Tensor, out: Tensor, after: torch.Event | None) -> None:
        """Copy bytes, ``(n,)`` to ``(n,)``: each piece into a free pinned buffer, from there to ``out``.

        A source that is pinned itself is copied at once.
        """
        events: list[torch.Event] = []
        if after is not None:
            self._up_stream.wait_event(after)
        if source.is_pinned():
            _start(self._up_stream, source, out).synchronize()
            return
        pieces = zip(torch.split(source, self._size), torch.split(out, self._size), strict=True)
        for i, (piece, target) in enumerate(pieces):
            if i >= SLOTS:
                events[i - SLOTS].synchronize()
            slot = self._up[i % SLOTS][: piece.numel()]
            slot.copy_(piece)
            events.append(_start(self._up_stream, slot, target))
        self._up_stream.synchronize()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _start(stream: torch.Stream, source: Tensor, out: Tensor) -> torch.Event:
    """Start a copy in a stream; one side is pinned. The event is its end."""
    with on(stream):
        out.copy_(source, non_blocking=True)
    return record_event(stream)
