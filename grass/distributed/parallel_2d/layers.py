"""Layers whose inputs, outputs and parameters are spread over a grid.

A layer keeps its module, its names and its state dict; its parameters become ``DTensor``. Between layers every rank has
plain tensors ``(b/a, s, h/b)``: its part of the batch and its block of the features. So attention, activations and
residual sums of the model's own code run as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.nn import functional as F

from grass.compact_mode.linear_function import differentiable_once
from grass.distributed.parallel_2d.mesh import (
    FEATURES,
    TABLE,
    WEIGHT,
    WHOLE,
    Grid,
    RowSum,
    SummedGradient,
    arrived,
)
from grass.distributed.parallel_2d.summa import input_gradient, product, weight_gradient, weight_panel
from grass.private_names import assert_async


class Linear2D(nn.Linear):
    """``x W^T + b`` (:mod:`grass.distributed.parallel_2d.summa`). :func:`parallelize_2d` makes it."""

    _grid: Grid
    divided_by = "a grid of ranks"
    selected_dims = (1,)

    @property
    def strata(self) -> int:
        """Into how many block columns the ranks divide the weight."""
        return self._grid.rows

    def forward(self, x: Tensor) -> Tensor:
        """``(..., n/b) -> (..., m/b)``."""
        weight = local_part(self.weight, WEIGHT)
        x, weight = autocast_to(x, weight)
        y: Tensor = _Linear.apply(x.flatten(0, -2), weight, self._grid)  # type: ignore[no-untyped-call]
        return self.with_bias(y.view(*x.shape[:-1], -1))

    def with_bias(self, y: Tensor) -> Tensor:
        """``y + b``."""
        return y if self._parameters["bias"] is None else y + vector(self, "bias").to(y.dtype)


class _Linear(torch.autograd.Function):
    """``x W^T`` with the gradients of input and whole weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid) -> Tensor:
        """Multiply; save this rank's blocks."""
        ctx.grid = grid
        ctx.save_for_backward(x, weight)
        return product(grid, x, lambda p: weight_panel(grid, weight, p))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gather both operands again."""
        (x, weight), grid, grad = ctx.saved_tensors, ctx.grid, grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = arrived(input_gradient(grid, grad, lambda p: weight_panel(grid, weight, p)))
        if ctx.needs_input_grad[1]:
            grad_weight = arrived(grid.sum_replicas(weight_gradient(grid, x, grad)))
        return grad_x, grad_weight, None


class Embedding2D(nn.Embedding):
    """Rows of a table: each rank looks up its part of the vocabulary for the tokens of its column."""

    _grid: Grid

    def forward(self, ids: Tensor) -> Tensor:
        """``(b/a, s) -> (b/a, s, h/b)``."""
        table = local_part(self.weight, TABLE)
        rows: Tensor = _Embedding.apply(ids, table, self._grid, self.padding_idx)  # type: ignore[no-untyped-call]
        return rows


class _Embedding(torch.autograd.Function):
    """Look up what is here and sum over the column; backward gathers the gradients of the column's tokens."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, grid: Grid, padding: int | None) -> Tensor:
        """Look up; rows of ``padding`` get no gradient."""
        inside = (ids >= 0) & (ids < table.shape[0] * grid.rows)
        assert_async(inside.all(), "Token ids must be from 0 to the vocabulary size - 1")
        ids = arrived(grid.gather_column(ids))
        every = ids - grid.row * table.shape[0]
        here = (every >= 0) & (every < table.shape[0])
        ctx.grid, ctx.shape = grid, table.shape
        ctx.save_for_backward(every, here if padding is None else here & (ids != padding))
        rows = F.embedding(every.where(here, 0), table).masked_fill_(~here.unsqueeze(-1), 0.0)
        return arrived(grid.scatter_column(rows))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Add up the rows' gradients."""
        every, learns = ctx.saved_tensors
        grads = arrived(ctx.grid.gather_column(grad))
        table = grad.new_zeros(ctx.shape).index_add_(0, every[learns], grads[learns])
        return None, arrived(ctx.grid.sum_replicas(table)), None, None


class RMSNorm2D(nn.Module):
    """``w x / sqrt(mean(x^2) + eps)``; the squares are summed over the row.

    Attributes:
        eps: added to the mean square.
        squares_dtype: the precision of the mean square and the quotient; ``None`` for that of ``x``, at least float32.
        of_heads: whether it reads the features of one head, which a rank has all of.
    """

    _grid: Grid
    eps: float
    squares_dtype: torch.dtype | None
    of_heads: bool

    def forward(self, x: Tensor) -> Tensor:
        """``(..., h/b) -> (..., h/b)``."""
        wide = x.to(self.squares_dtype or torch.promote_types(x.dtype, torch.float32))
        squares, size = wide.pow(2).sum(-1, keepdim=True), x.shape[-1]
        if not self.of_heads:
            squares, size = RowSum.apply(squares, self._grid), size * self._grid.columns  # type: ignore[no-untyped-call]
        wide = wide * torch.rsqrt(squares / size + self.eps)
        return vector(self, "weight", of_heads=self.of_heads) * wide.to(x.dtype)


class LayerNorm2D(nn.Module):
    """``w (x - mean) / sqrt(var + eps) + b``; mean and variance are those of the row's features."""

    _grid: Grid
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """``(..., h/b) -> (..., h/b)``."""
        grid, size = self._grid, x.shape[-1] * self._grid.columns
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean: Tensor = RowSum.apply(wide.sum(-1, keepdim=True), grid)  # type: ignore[no-untyped-call]
        wide = wide - mean / size
        squares: Tensor = RowSum.apply(wide.pow(2).sum(-1, keepdim=True), grid)  # type: ignore[no-untyped-call]
        y = (wide * torch.rsqrt(squares / size + self.eps)).to(x.dtype)
        y = y if self.weight is None else y * vector(self, "weight")
        return y if self.bias is None else y + vector(self, "bias")


def local_part(p: Any, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's part of a parameter; its gradient is placed as the parameter is."""
    part: Tensor = p.to_local(grad_placements=placements)
    return part


def vector(module: nn.Module, name: str, of_heads: bool = False) -> Tensor:
    """This rank's part of a vector of features, with its gradient summed over all tokens that read it."""
    own = local_part(getattr(module, name), WHOLE if of_heads else FEATURES)
    part: Tensor = SummedGradient.apply(own, module._grid, of_heads)  # type: ignore[no-untyped-call]
    return part


def autocast_to(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype of autocast if it is on: blocks then travel in it."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        return x.to(dtype), weight.to(dtype)
    return x, weight


def become(module: Any, cls: type[nn.Module], grid: Grid, **named: Any) -> None:
    """Change a module's class, its parameters and its attributes; placements are those of parameters."""
    for name, value in named.items():
        p = module._parameters.get(name)
        if p is not None:
            module._parameters[name] = nn.Parameter(grid.shard(p.detach(), value), p.requires_grad)
        elif not isinstance(value, tuple):
            setattr(module, name, value)
    module._grid = grid
    module.__class__ = cls
