r"""Converted layers that ``parallelize_module`` has divided among ``p`` ranks.

The weight ``W (m, n)`` is a ``DTensor``: ``Shard(0)`` by ``ColwiseParallel``, ``Shard(1)`` by ``RowwiseParallel``. The
active rows are one too, divided along the same dimension. Every rank multiplies its own parts:

=========  ===================================  =================  =====================
weight     input, its gradient                  output             gradient of ``active``
=========  ===================================  =================  =====================
Shard(0)   whole, ``g_k W_k``: a part of a sum  features ``m_k``   of ``m_k``
Shard(1)   features ``n_k``                     a part of a sum    of ``n_k``
=========  ===================================  =================  =====================

So gradients of active rows are complete where they are computed, and no rank sends any. The parallel styles sum input
gradients and outputs, as they do for plain layers.

What Grass selects is either whole on no rank or divided among them:

- Divided along the other dimension (``dim=1`` with ``Shard(0)``, ``dim=0`` with ``Shard(1)``), every rank has its part
  of every column (``dim=0``: row). All select alike, and lengths are summed over the ranks, as under FSDP2.
- Divided along the selected dimension, each rank has ``1 / p`` of the columns. They are a stratum, of which the rank
  selects ``r / p`` columns and explores ``q / p`` by draws of its own.

A sketch for rules by norm is averaged over all ranks as that of the whole weight: each adds ``p`` times its part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from grass.compact_mode.divided import DividedLayer
from grass.compact_mode.layer import CompactLinear
from grass.compact_mode.strata import TENSOR_PARALLELISM
from grass.parallel.shards import shard_dim


class TensorParallelLinear(DividedLayer, CompactLinear):
    """A converted ``nn.Linear`` that ``parallelize_module`` has divided."""

    divided_by = TENSOR_PARALLELISM

    def row_placement(self) -> Placement:
        """As the weight is divided."""
        placement: Placement = self.weight.placements[-1]
        return placement

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n)`` of the stratum."""
        m, n = self.weight.shape
        return (m // self.strata, n) if self.dim == 0 else (m, n // self.strata)

    def set_matrix(self, matrix: Tensor) -> None:
        """Make this rank's part of the weight its storage."""
        self.weight.data = self._placed(matrix)

    def rows_of_stratum(self, whole: Tensor) -> Tensor:
        """The stratum's part of a vector over all rows."""
        return whole.chunk(self.strata)[self.stratum]

    def begin_sketch(self, signs: Tensor | None) -> None:
        """As :meth:`CompactLayer.begin_sketch`; this rank has the signs of its part of the other dimension."""
        width = self.shape[1 - self.dim]
        if self.strata == 1:
            width //= self._ranks
            signs = None if signs is None else signs.narrow(0, self._place * width, width)
        self.signs = signs
        size = self.shape[self.dim], width if signs is None else signs.shape[1]
        self.sketch = torch.zeros(size, dtype=torch.float32, device=self.weight.device, requires_grad=True)

    def end_sketch(self) -> Tensor:
        """As :meth:`CompactLayer.end_sketch`, such that the mean over all ranks is the sketch of the whole weight."""
        exact = self.sketch is not None and self.signs is None
        own = super().end_sketch()
        (rows, width), ranks, place = own.shape, self._ranks, self._place
        down = place * rows if self.strata > 1 else 0
        right = place * width if exact and self.strata == 1 else 0
        whole = own.new_zeros(rows * self.strata, width * ranks if exact and self.strata == 1 else width)
        whole[down : down + rows, right : right + width] = own * ranks
        return whole

    @torch.compiler.disable(reason="parts of a DTensor")  # type: ignore[no-untyped-call, untyped-decorator]
    def multiply(self, x: Tensor) -> Tensor:
        """The product of this rank's parts, as a ``DTensor``; the styles' hooks make ``x`` one and sum what is partial.

        Raises:
            TypeError: ``x`` is a plain tensor.
        """
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{self.label!r} is divided by {self.weight.placements} and takes a DTensor, got a plain tensor: "
                "divide it by ColwiseParallel or RowwiseParallel, whose hooks make one of its input"
            )
        by_output = shard_dim(self.weight.placements[-1]) == 0
        last, mesh = Shard(x.ndim - 1), x.device_mesh
        taken: Placement = Replicate() if by_output else last
        gradient: Placement = Partial() if by_output else last
        if x.placements != (taken,):
            x = x.redistribute(placements=[taken])
        y = self.product(x.to_local(grad_placements=[gradient]), self._own_bias(), self.active.to_local())  # type: ignore[attr-defined]
        output: Tensor = DTensor.from_local(y, mesh, [last if by_output else Partial()], run_check=False)
        return output

    def _own_bias(self) -> Tensor | None:
        """This rank's part of the bias; of a bias that all have, ``1 / p``, for outputs that are summed."""
        if self.bias is None:
            return None
        own: Tensor = self.bias.to_local()
        if shard_dim(self.bias.placements[-1]) is not None:
            return own
        shared: Tensor = _Share.apply(own, self._ranks)  # type: ignore[no-untyped-call]
        return shared


class _Share(torch.autograd.Function):
    """A bias over the number of ranks that add it, with the gradient of the whole bias on each."""

    @staticmethod
    def forward(ctx: object, bias: Tensor, ranks: int) -> Tensor:
        """Divide."""
        return bias / ranks

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient as it is."""
        return grad, None
