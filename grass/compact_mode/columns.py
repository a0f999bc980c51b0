"""The columns of an input that a converted layer saves for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grass.kernels.layout import select_columns


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
