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

``fully_shard`` may follow, over another dimension of the mesh; the ranks of tensor parallelism are then the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from grass.compact_mode.layer import CompactLinear
from grass.compact_mode.strata import TENSOR_PARALLELISM, strata_of
from grass.compact_mode.stratum_state import Strata
from grass.parallel.shards import local, shard_dim
from grass.state.schema import State


class TensorParallelLinear(CompactLinear):
    """A converted ``nn.Linear`` that ``parallelize_module`` has divided; ``chosen`` and ``rank`` are of its stratum."""

    divided_by = TENSOR_PARALLELISM

    @property
    def strata(self) -> int:  # type: ignore[override]
        """Into how many parts the ranks divide what is selected."""
        return strata_of(self, self.dim)

    @property
    def stratum(self) -> int:  # type: ignore[override]
        """Which of them is this rank's."""
        return self._place if self.strata > 1 else 0

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n)`` of the stratum."""
        m, n = self.weight.shape
        return (m // self.strata, n) if self.dim == 0 else (m, n // self.strata)

    @property
    def _ranks(self) -> int:
        """``p``."""
        return int(self.weight.device_mesh.shape[-1])

    @property
    def _place(self) -> int:
        """This rank's, of ``p``."""
        return int(self.weight.device_mesh.get_coordinate()[-1])

    def set_matrix(self, matrix: Tensor) -> None:
        """Make this rank's part of the weight its storage."""
        self.weight.data = self._placed(matrix)

    def as_parameter(self, rows: Tensor) -> nn.Parameter:
        """This rank's part of the active rows as a parameter that is divided as the weight is."""
        return nn.Parameter(self._placed(rows))

    def of_stratum(self, tensor: Tensor) -> Tensor:
        """The stratum's part of the parameter or its gradient, sharded as FSDP2 shards it."""
        if self.strata == 1:
            return tensor
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        if mesh.ndim == 1:
            return local(tensor)
        data, placements = mesh[mesh.mesh_dim_names[:-1]], tensor.placements[:-1]  # type: ignore[attr-defined]
        sizes = self._rows_shape()
        own: Any = local(tensor)
        return DTensor.from_local(own, data, placements, run_check=False, shape=sizes, stride=(sizes[1], 1))

    def rows_of_stratum(self, whole: Tensor) -> Tensor:
        """The stratum's part of a vector over all rows."""
        return whole.chunk(self.strata)[self.stratum]

    def saved_state(self, state: State) -> State:
        """:meth:`grass.compact_mode.stratum_state.Strata.saved_state`."""
        active = self.selected_part(self.rows()) if "active" in state else None
        return self._strata().saved_state(state, active)

    def held_state(self, state: State) -> State:
        """:meth:`grass.compact_mode.stratum_state.Strata.held_state`."""
        return self._strata().held_state(state)

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

    def _placed(self, part: Tensor) -> DTensor:
        """The ``DTensor`` that has ``part`` as this rank's part, divided as the weight is."""
        return DTensor.from_local(part, self.weight.device_mesh, self.weight.placements, run_check=False)

    def _rows_shape(self) -> torch.Size:
        """The shape of the stratum's active rows."""
        sizes = list(self.shape)
        sizes[self.dim] = self.chosen.shape[0]
        return torch.Size(sizes)

    def _strata(self) -> Strata:
        active = self.active
        mesh, placements = active.device_mesh, active.placements  # type: ignore[attr-defined]
        return Strata(mesh, mesh.ndim - 1, placements, self.dim, self.shape)


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
