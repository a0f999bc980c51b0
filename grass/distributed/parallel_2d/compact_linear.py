r"""A linear layer on a grid whose active columns are the parameter.

The columns of ``W (m, n)`` lie in ``a`` *strata*, one for each row of the grid: stratum ``i`` has the input features
``n_i``. Of each stratum ``r / a`` columns are selected and ``q / a`` explored, by the rules and draws of any converted
layer: to the optimizer, a rank's layer is the block column ``W[:, n_i]``, sharded over its row of the grid. Then only
active columns travel for the gradient::

    dW[:, sigma] = dY^T X[:, sigma]      X[:, sigma] gathered along the row, summed over the column

Per layer and step, in elements that a rank of a ``q x q`` grid receives, with ``X = T n / q^2``, ``W = m n / q^2`` and
``rho`` the share of active columns::

    forward     (q - 1) (X + W)
    backward    (q - 1) (W + X)                      gathered weight, summed input gradient
                (q - 1) rho (X + W)                  gathered active inputs, summed gradient of active columns
                (q - 1) rho n / q                    their indices, int64, once a step

so ``(2 + rho) / 3`` of what whole gradients take. With cached panels the weight itself does not travel any more: its
active columns do, ``(q - 1) rho W`` once a step, with their indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from grass.compact_mode.divided import StratumLayer
from grass.compact_mode.linear_function import differentiable_once
from grass.compact_mode.synced_rows import LastChange, Stamp, Stamps
from grass.distributed.parallel_2d.layers import Linear2D, autocast_to, local_part
from grass.distributed.parallel_2d.mesh import WEIGHT, Grid, arrived
from grass.distributed.parallel_2d.summa import (
    input_gradient,
    product,
    summed_product,
    weight_gradient,
    weight_panel,
)
from grass.kernels.layout import select_columns
from grass.parallel.shards import local
from grass.selection.exploration import first_rows
from grass.state.strata import Strata

Weights = Callable[[int], Tensor]
"""Returns a panel of the column's weights (:func:`grass.distributed.parallel_2d.summa.weight_panel`)."""


class CompactLinear2D(StratumLayer, Linear2D):
    """A converted :class:`Linear2D`; ``chosen``, ``rank`` and ``shape`` are those of this rank's stratum."""

    plain_class: type[nn.Module] = Linear2D
    _every_chosen: tuple[tuple[int, int], Tensor] | None = None  # which `chosen` was gathered, and the column's
    _cache: tuple[int, Stamp, Tensor] | None = None  # steps and stamp of the weight, the column's (a, m/b, n/a)

    strata, divided_by = Linear2D.strata, Linear2D.divided_by
    sums_sketch = True

    @property
    def stratum(self) -> int:  # type: ignore[override]
        """Which of them is this rank's."""
        return self._grid.row

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n / a)``: of the stratum."""
        m, n = self.weight.shape
        return m, n // self._grid.rows

    def set_matrix(self, matrix: Tensor) -> None:
        """Make this rank's ``(m/b, n/a)`` the weight's storage."""
        self.weight.data = self._grid.own(matrix, WEIGHT)
        self._listen()

    def as_parameter(self, rows: Tensor) -> nn.Parameter:
        """This rank's active columns ``(m/b, (r + q)/a)`` as a parameter ``(m, r + q)``."""
        return nn.Parameter(self._grid.own(rows, WEIGHT))

    def of_stratum(self, tensor: Tensor) -> Tensor:
        """The stratum's columns of the parameter or its gradient: ``(m, (r + q)/a)``, sharded over the row."""
        sharded: Tensor = DTensor.from_local(local(tensor), self._grid.row_mesh, [Shard(0)], run_check=False)
        return sharded

    def _strata(self) -> Strata:
        return Strata(self._grid.mesh, 0, WEIGHT, 1, self.shape)

    def begin_sketch(self, signs: Tensor | None) -> None:
        """As :meth:`CompactLayer.begin_sketch`; this rank has the signs of its output features."""
        outputs = self.rows().shape[0]
        self.signs = None if signs is None else signs.narrow(0, self._grid.column * outputs, outputs)
        width = outputs if signs is None else signs.shape[1]
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.rows().device, "requires_grad": True}
        self.sketch = torch.zeros(self.shape[1], width, **options)

    def end_sketch(self) -> Tensor:
        """As :meth:`CompactLayer.end_sketch`; of a whole gradient, its norms over the row's output features."""
        exact = self.sketch is not None and self.signs is None
        sketch = super().end_sketch()
        if not exact:
            return sketch
        return arrived(self._grid.sum_row(sketch.square().sum(dim=1, keepdim=True))).sqrt()

    def mark_synced(self) -> None:
        """As of a weight that is not sharded: changes by hand are seen (:meth:`stamps`)."""
        super().mark_synced()
        self.synced.sharded = False

    def _listen(self) -> None:
        """Hear which columns a step has written, if gathered weights are kept."""
        self.listeners = (LastChange(),) if self._grid.cache_panels else ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As of any layer."""
        super().__setstate__(state)
        self._listen()

    def unconvert(self) -> None:
        """Write the active columns into the weight, and forget what was gathered."""
        super().unconvert()
        for name in ("_every_chosen", "_cache"):
            self.__dict__.pop(name, None)

    def stamps(self) -> Stamps | None:
        """Changes of a ``DTensor`` or of this rank's part count; on the meta device there is nothing to change."""
        if self.active.is_meta:
            return None
        return _stamp(self.active), _stamp(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., n/b) -> (..., m/b)``."""
        self.sync(probe=torch.is_grad_enabled())
        weight, dtype = self.matrix(), self.weight.dtype
        x, weight = autocast_to(x, weight)
        weights, flat = self._weights(weight, cached=weight.dtype == dtype), x.flatten(0, -2)
        if not torch.is_grad_enabled():
            y = product(self._grid, flat, weights)
        else:
            active = local_part(self.active, WEIGHT)
            y = _CompactLinear.apply(flat, weight, active, self.fed_sketch(), self, weights, self._chosen_of_input())  # type: ignore[no-untyped-call]
        return self.with_bias(y.view(*x.shape[:-1], -1))

    def _chosen_of_input(self) -> Tensor:
        """int64 ``(k (r + q)/a,)``: the active columns of the strata in this rank's block of the inputs."""
        grid, own = self._grid, (id(self.chosen), self.chosen._version)
        if self._every_chosen is None or self._every_chosen[0] != own:
            self._every_chosen = own, arrived(grid.gather_column(self.chosen))
        k, width = grid.rows // grid.columns, self.shape[1]
        every = self._every_chosen[1].narrow(0, grid.column * k, k)
        return (every + first_rows(k, k * width, every.device)).flatten()

    def _weights(self, weight: Tensor, *, cached: bool) -> Weights:
        """How to gather the column's weights; they are there already if panels are cached."""
        grid = self._grid
        if not (grid.cache_panels and cached):
            return lambda p: weight_panel(grid, weight, p)
        every, width = self._cached(weight), weight.shape[1] // grid.panels
        return lambda p: every.narrow(2, p * width, width)

    def _cached(self, weight: Tensor) -> Tensor:
        """The column's weights; if one step has changed them since, only what it has written is sent."""
        change, grid, now = LastChange.of(self) or LastChange(), self._grid, _stamp(self.weight)
        number, then, every = self._cache or (-1, None, weight)
        if (number, then) == (change.number, now):
            return every
        if number == change.number - 1 and change.rows is not None and (change.before, change.after) == (then, now):
            rows = arrived(grid.gather_column(change.rows))
            values = arrived(grid.gather_column(select_columns(weight, change.rows).t()))
            for block, own, columns in zip(every, rows, values, strict=True):
                block.index_copy_(1, own, columns.t())
        else:
            every = torch.cat([arrived(weight_panel(grid, weight, p)) for p in range(grid.panels)], dim=2)
        self._cache = change.number, now, every
        return every


def _stamp(p: Tensor) -> Stamp:
    """Identity, version and address of a ``DTensor``, which differ after any change of it or of this rank's part."""
    own = local(p)
    return id(p), p._version + own._version, own.data_ptr()


class _CompactLinear(torch.autograd.Function):
    """``x W^T`` with the gradients of input, active columns and sketch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        active: Tensor,
        sketch: Tensor | None,
        layer: CompactLinear2D,
        weights: Weights,
        chosen: Tensor,
    ) -> Tensor:
        """Multiply; save the active columns of this rank's inputs."""
        ctx.layer, ctx.weights, ctx.grid = layer, weights, layer._grid
        ctx.signs, ctx.sketching, ctx.active_dtype = layer.signs, sketch is not None, active.dtype
        ctx.rank, ctx.gradient_scale = layer.rank, layer.gradient_scale
        ctx.save_for_backward(x if ctx.sketching else select_columns(x, chosen), chosen)
        return product(layer._grid, x, weights)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The active inputs are on their way while the input's gradient is computed."""
        (x, chosen), grid, grad = ctx.saved_tensors, ctx.grid, grad.contiguous()
        picked = select_columns(x, chosen) if ctx.sketching else x
        k = grid.rows // grid.columns
        gathered = grid.gather_row(picked.view(picked.shape[0], k, -1))
        grad_x = arrived(input_gradient(grid, grad, ctx.weights)) if ctx.needs_input_grad[0] else None
        columns = arrived(grid.sum_replicas(summed_product(grid, gathered, grad))).to(ctx.active_dtype)
        if ctx.gradient_scale != 1.0:
            columns[:, ctx.rank :].mul_(ctx.gradient_scale)
        sketch = _sketch(grid, x, grad, ctx.signs) if ctx.sketching else None
        return grad_x, None, columns, sketch, None, None, None


def _sketch(grid: Grid, x: Tensor, grad: Tensor, signs: Tensor | None) -> Tensor:
    """``G^T S`` of the stratum, ``(n/a, s)``; without signs, this rank's part ``(n/a, m/b)`` of the gradient."""
    if signs is None:
        return arrived(grid.sum_replicas(weight_gradient(grid, x, grad))).t().float()
    mixed = arrived(grid.sum_row(grad.float() @ signs.float()))
    every = arrived(grid.gather_row(x.float().t() @ mixed))
    return arrived(grid.sum_replicas(grid.scatter_column(every.view(grid.rows, -1, mixed.shape[1]))))
