"""Temporary memory of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from grass.kernels.layout import is_dense


class ScratchPool:
    """Hands the same memory to one list of weights after another.

    Without it the temporaries of a step cost more on a CPU than its arithmetic: fresh memory faults in page by page.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def like(self, slot: int, compacts: list[Tensor]) -> list[Tensor]:
        """Uninitialised tensors of the shapes, dtype and device of ``compacts``, which share one dtype.

        They have the strides of :func:`is_dense` tensors and are row-major otherwise. The next call with the same
        ``slot`` reuses their memory.
        """
        key, size = (slot, compacts[0].dtype, compacts[0].device), sum(t.numel() for t in compacts)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=key[1], device=key[2])
        views, offset = [], 0
        for t in compacts:
            stride = t.stride() if is_dense(t) else torch.empty(t.shape, device="meta").stride()
            views.append(self._buffers[key].as_strided(t.shape, stride, offset))
            offset += t.numel()
        return views
