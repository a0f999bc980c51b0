"""The autograd functions of a converted layer: what it saves, and the gradients of active rows and sketch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from grass.compact_mode.products import inner_product, picked_product, sketch_product
from grass.compact_mode.weight_codes import decode_weight
from grass.kernels.layout import select_columns

_T = TypeVar("_T")

NO_SECOND_DERIVATIVE = (
    "create_graph=True does not work here: converted experts, layers that ranks divide, compiled ones and Triton's "
    "kernels have first derivatives only. Call grass.expand(model) first"
)


class CompactLinearFunction(torch.autograd.Function):
    """``x W^T + b``. The weight itself gets no gradient; :mod:`grass.compact_mode.layer` has the formulas."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        columns: Tensor | None,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        active: Tensor,
        chosen: Tensor,
        dim: int,
        rank: int,
        gradient_scale: float,
        sketch: Tensor | None,
        signs: Tensor | None,
    ) -> Tensor:
        """Multiply by the weight; save ``columns``, which are ``x[..., chosen]``, or ``x`` if they are ``None``."""
        ctx.dim, ctx.active_dtype, ctx.rank, ctx.gradient_scale = dim, active.dtype, rank, gradient_scale
        ctx.narrow, ctx.sketching = columns is not None, sketch is not None
        ctx.active = None if torch.compiler.is_compiling() else active
        ctx.save_for_backward(x if columns is None else columns, weight, scale, chosen, signs)
        return F.linear(x, _values(weight, scale, dim, x.dtype), bias).detach()  # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, bias, active rows and sketch; differentiable again with ``create_graph=True``."""
        x, weight, scale, chosen, signs = ctx.saved_tensors
        if torch.is_grad_enabled():
            _check_differentiable(ctx, x)
        grad_x = None
        if ctx.needs_input_grad[0]:
            values = _values(weight, scale, ctx.dim, grad.dtype)
            grad_x = grad @ (_depending_on(values, ctx) if torch.is_grad_enabled() else values)
        g, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_bias = g.sum(0) if ctx.needs_input_grad[4] else None
        if ctx.dim == 0:
            rows = picked_product(g, chosen, x)
        else:
            rows = inner_product(g, x) if ctx.narrow else picked_product(x, chosen, g).t()
        rows = rows.to(ctx.active_dtype)
        if ctx.gradient_scale != 1.0:
            rows = scale_explored(rows, ctx)
        grad_sketch = None
        if ctx.sketching:
            with torch.no_grad():
                grad_sketch = sketch_product(g, x, signs) if ctx.dim == 0 else sketch_product(x, g, signs)
        return grad_x, None, None, None, grad_bias, rows, None, None, None, None, grad_sketch, None


def differentiable_once(backward: Callable[..., _T]) -> Callable[..., _T]:
    """A backward that raises with ``create_graph=True``.

    ``torch.autograd.function.once_differentiable`` raises later, and not where ``inputs=`` cuts its error out of the
    graph: second derivatives would lack terms.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> _T:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        return backward(ctx, *grads)

    return checked


def _check_differentiable(ctx: Any, x: Tensor) -> None:
    """Refuse a second derivative by an input whose columns were gathered outside of autograd."""
    if ctx.active is None or (ctx.narrow and ctx.needs_input_grad[0] and not x.requires_grad):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def scale_explored(rows: Tensor, ctx: Any) -> Tensor:
    """Multiply the gradient of explored rows by ``gradient_scale``: in place, unless it is to be differentiated."""
    selected, explored = rows.tensor_split([ctx.rank], ctx.dim)
    if torch.is_grad_enabled():
        return torch.cat([selected, explored * ctx.gradient_scale], ctx.dim)
    explored.mul_(ctx.gradient_scale)
    return rows


def _depending_on(values: Tensor, ctx: Any) -> Tensor:
    """The weight's values ``(m, n)`` as a function of the active rows, with the gradient that backward gives these."""
    active, dim = ctx.active, ctx.dim
    if ctx.gradient_scale != 1.0:
        factors = torch.ones(active.shape[dim], dtype=active.dtype, device=active.device)
        factors[ctx.rank :] = ctx.gradient_scale
        scaled = active * factors.unsqueeze(1 - dim)
        active = scaled + (active - scaled).detach()
    chosen = ctx.saved_tensors[3]
    return values.index_copy(dim, chosen, active.to(values.dtype))


def _values(weight: Tensor, scale: Tensor | None, dim: int, dtype: torch.dtype) -> Tensor:
    """The weight's values: decoded if it has a scale, else the weight itself."""
    return weight if scale is None else decode_weight(weight, scale, dim, dtype)


def saved_columns(x: Tensor, chosen: Tensor) -> Tensor:
    """``x[..., chosen]``: ``(..., n) -> (..., k)``; differentiable, unless ``torch.compile`` traces it."""
    if torch.compiler.is_compiling() or x.is_inference():
        with torch.no_grad():
            plain: Tensor = select_columns(x, chosen)
        return plain
    columns: Tensor = _SelectColumns.apply(x, chosen)  # type: ignore[no-untyped-call]
    return columns


class _SelectColumns(torch.autograd.Function):
    """``x[..., chosen]``, which keeps nothing of ``x`` for its derivative: ``torch.gather`` would keep all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor) -> Tensor:
        """Gather."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(chosen)
        ctx.shape = x.shape
        columns: Tensor = select_columns(x, chosen)
        return columns

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """Scatter; ``grad`` is ``None`` unless a second derivative is taken."""
        if grad is None:
            return None, None
        (chosen,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add(-1, chosen, grad), None
