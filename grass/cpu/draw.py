"""The rows that converted layers explore next, for all layers of a group in one call of compiled C++.

``draw.cpp`` draws the same rows as :func:`grass.selection.exploration.draw_explored` and gathers their values. Torch's
operators cost more than the copy itself for all but large layers.

Floor, for ``q`` rows of ``n`` values of ``e`` bytes: values read and written, ``2qne`` bytes. Where the values of a row
are not neighbours in memory, a cache line of the weight is read for each: at most all of the weight.
"""

from __future__ import annotations

import struct

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from grass.cpu.kernel import is_wanted, library, threads

_LAYER = struct.Struct("3P10q")  # struct Layer in the source
_PLAIN = (Tensor, nn.Parameter)
_ITEM_SIZES = (2, 4, 8)


class Draws:
    """Layers whose explored rows one call of the kernel draws and gathers.

    Args:
        fused: as for :class:`grass.cpu.kernel.Batch`.
    """

    def __init__(self, fused: bool | None) -> None:
        self._fused = fused
        self._layers: list[bytes] = []
        self._changed: list[Tensor] = []

    def add(self, weight: Tensor, axis: int, active: Tensor, dim: int, chosen: Tensor, rank: int, key: int) -> bool:
        """Take a layer if weight and active rows are plain tensors on the CPU, of one type and any strides.

        Tensors must live until :meth:`run`.

        Args:
            weight: the whole weight, two-dimensional.
            axis: the dimension of ``weight`` along which rows are chosen.
            active: values of selected and explored rows, in this order; gets those of explored rows.
            dim: the dimension of ``active`` along which they lie.
            chosen: int64 ``(r + q,)``, contiguous: the indices of these rows; gets those of explored rows.
            rank: ``r``; ``q`` is above 0.
            key: of the random bits (:func:`grass.selection.exploration.draw_key`).

        Raises:
            RuntimeError: ``fused=True``, and there is no compiler or it fails.
        """
        if type(weight) not in _PLAIN or type(active) not in _PLAIN or not (weight.is_cpu and active.is_cpu):
            return False
        size = weight.element_size()
        if active.dtype is not weight.dtype or size not in _ITEM_SIZES or not is_wanted(self._fused):
            return False
        strides, own = weight.stride(), active.stride()
        self._layers.append(
            _LAYER.pack(
                weight.data_ptr(),
                active.data_ptr() + rank * own[dim] * size,
                chosen.data_ptr(),
                weight.shape[axis],
                rank,
                active.shape[dim] - rank,
                weight.shape[1 - axis],
                size,
                strides[axis],
                strides[1 - axis],
                own[dim],
                own[1 - dim],
                key,
            )
        )
        self._changed += active, chosen
        return True

    def run(self) -> None:
        """Draw and gather for all layers taken."""
        if not self._layers:
            return
        library().explore(b"".join(self._layers), len(self._layers), threads())
        increment_version(self._changed)
