"""The autograd function of a converted layer: its backward computes gradients of the active rows and the sketch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grass.compact_mode.products import inner_product, picked_product, sketch_product
from grass.compact_mode.weight_codes import decode_weight


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
        ctx.save_for_backward(x if columns is None else columns, weight, scale, chosen, signs)
        return F.linear(x, _values(weight, scale, dim, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, bias, active rows and sketch."""
        x, weight, scale, chosen, signs = ctx.saved_tensors
        grad_x = grad @ _values(weight, scale, ctx.dim, grad.dtype) if ctx.needs_input_grad[0] else None
        g, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_bias = g.sum(0) if ctx.needs_input_grad[4] else None
        if ctx.dim == 0:
            rows = picked_product(g, chosen, x)
        else:
            rows = inner_product(x, g) if ctx.narrow else picked_product(x, chosen, g)
        rows = rows.to(ctx.active_dtype)
        if ctx.gradient_scale != 1.0:
            rows[ctx.rank :].mul_(ctx.gradient_scale)
        grad_sketch = None
        if ctx.sketching:
            grad_sketch = sketch_product(g, x, signs) if ctx.dim == 0 else sketch_product(x, g, signs)
        grad_active = rows if ctx.dim == 0 else rows.t()  # the layout of active
        return grad_x, None, None, None, grad_bias, grad_active, None, None, None, None, grad_sketch, None


def _values(weight: Tensor, scale: Tensor | None, dim: int, dtype: torch.dtype) -> Tensor:
    """The weight's values: decoded if it has a scale, else the weight itself."""
    return weight if scale is None else decode_weight(weight, scale, dim, dtype)
