"""The autograd function of a converted layer: what it saves, and the gradients of active rows and sketch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from grass.compact_mode.products import inner_product, sketch_product
from grass.compact_mode.weight_codes import decode_weight
from grass.kernels.layout import select_columns
from grass.private_names import is_saved_by_its_maker
from grass.state.master import is_half

_T = TypeVar("_T")

NO_SECOND_DERIVATIVE = (
    "create_graph=True does not work here: converted experts, layers that ranks divide, compiled ones and Triton's "
    "kernels have first derivatives only. Call grass.expand(model) first"
)


class CompactLinearFunction(torch.autograd.Function):
    """``x W^T + b``, and what backward keeps of ``x``. :mod:`grass.compact_mode.layer` has the formulas.

    For columns that is ``x[..., chosen]``, or ``x`` where it is kept anyway. The columns are a second result and so
    part of the graph: second derivatives find their way through them to ``x``. The weight itself gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
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
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply by the weight; save ``x``, or its chosen columns if that is all that backward needs."""
        compiling = torch.compiler.is_compiling()
        whole = dim == 0 or sketch is not None or (not compiling and is_saved_by_its_maker(x))
        columns = None if whole else select_columns(x, chosen)
        ctx.dim, ctx.active_dtype, ctx.rank, ctx.gradient_scale = dim, active.dtype, rank, gradient_scale
        ctx.narrow, ctx.sketching, ctx.shape = columns is not None, sketch is not None, x.shape
        ctx.active = None if compiling else active
        if not compiling:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if columns is None else columns, weight, scale, chosen, signs)
        y = F.linear(x, _values(weight, scale, dim, x.dtype), bias).detach()  # no view: it may be changed in place
        return y, None if compiling else columns

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_columns: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Gradients of input, bias, active rows and sketch; differentiable again with ``create_graph=True``.

        ``grad_columns`` is ``None`` unless a second derivative is taken.
        """
        x, weight, scale, chosen, signs = saved_of(ctx)
        if torch.is_grad_enabled() and ctx.active is None:
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        grad_x = grad_bias = rows = grad_sketch = None
        if grad_columns is not None and ctx.needs_input_grad[0]:
            grad_x = grad_columns.new_zeros(ctx.shape).index_add(-1, chosen, grad_columns)
        if grad is not None:
            if ctx.needs_input_grad[0]:
                values = _values(weight, scale, ctx.dim, grad.dtype)
                through = grad @ (_depending_on(values, ctx, chosen) if torch.is_grad_enabled() else values)
                grad_x = through if grad_x is None else grad_x + through
            g, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            grad_bias = g.sum(0) if ctx.needs_input_grad[3] else None
            rows = _gradient_of_rows(ctx, g, x, chosen)
            if ctx.sketching:
                with torch.no_grad():
                    grad_sketch = sketch_product(g, x, signs) if ctx.dim == 0 else sketch_product(x, g, signs)
        return grad_x, None, None, grad_bias, rows, None, None, None, None, grad_sketch, None


def saved_of(ctx: Any) -> tuple[Any, ...]:
    """What forward has saved.

    Raises:
        RuntimeError: weight or columns have changed since.
    """
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "backward() comes after the weight or the active columns of a converted layer were changed, as by "
            f"optimizer.step(): call it before, or compute the loss again. PyTorch says: {error}"
        ) from error


def _gradient_of_rows(ctx: Any, g: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    """The gradient of the active rows, of ``g (b, m)`` and what was saved of ``x``."""
    if ctx.dim == 0:
        rows = inner_product(_picked(g, chosen), x)
    else:  # gathering inside of the product would read all of x again for every block of its columns
        rows = inner_product(g, x if ctx.narrow else _picked(x, chosen))
    return rows.to(ctx.active_dtype) if ctx.gradient_scale == 1.0 else scale_explored(rows, ctx)


def _picked(a: Tensor, indices: Tensor) -> Tensor:
    """``a[:, indices]``, differentiable where a second derivative is taken."""
    return a[:, indices] if torch.is_grad_enabled() else select_columns(a, indices)


@functools.lru_cache(maxsize=256)
def _factors(count: int, rank: int, gradient_scale: float, device: torch.device) -> Tensor:
    """float32 ``(r + q,)``: 1 for selected rows, ``gradient_scale`` for explored ones."""
    factors = torch.ones(count, dtype=torch.float32, device=device)  # whatever the default dtype is
    factors[rank:] = gradient_scale
    return factors


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


def scale_explored(rows: Tensor, ctx: Any) -> Tensor:
    """Cast a gradient to the type of the active rows, and multiply that of explored rows by ``gradient_scale``."""
    differentiated, fake = torch.is_grad_enabled(), type(rows) is not Tensor or torch.compiler.is_compiling()
    if is_half(rows.dtype) and ctx.active_dtype == torch.float32 and not differentiated and not fake:
        factors = _factors(rows.shape[ctx.dim], ctx.rank, ctx.gradient_scale, rows.device)
        return rows * factors.unsqueeze(1 - ctx.dim)  # one pass over the rows, where the lines below take three
    rows = rows.to(ctx.active_dtype)
    selected, explored = rows.tensor_split([ctx.rank], ctx.dim)
    if differentiated:
        return torch.cat([selected, explored * ctx.gradient_scale], ctx.dim)
    explored.mul_(ctx.gradient_scale)
    return rows


def _depending_on(values: Tensor, ctx: Any, chosen: Tensor) -> Tensor:
    """The weight's values ``(m, n)`` as a function of the active rows, with the gradient that backward gives these.

    Of the active rows only the gradient counts: a tensor without their values may stand in their place.
    """
    active, dim = ctx.active, ctx.dim
    if ctx.gradient_scale != 1.0:
        factors = torch.ones(active.shape[dim], dtype=active.dtype, device=active.device)
        factors[ctx.rank :] = ctx.gradient_scale
        active = active * factors.unsqueeze(1 - dim)
    rows = active.to(values.dtype)
    return values.index_copy(dim, chosen, rows + (values.index_select(dim, chosen) - rows).detach())


def _values(weight: Tensor, scale: Tensor | None, dim: int, dtype: torch.dtype) -> Tensor:
    """The weight's values: decoded if it has a scale, else the weight itself."""
    return weight if scale is None else decode_weight(weight, scale, dim, dtype)
