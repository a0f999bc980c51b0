r"""Add rows or columns in place: ``out[sigma_j] += alpha rho_j x_j``, rows that occur twice adding up.

==========================  ===================================  ===========================================
operation                   shapes                               floor, in bytes of ``e`` per element
==========================  ===================================  ===========================================
:func:`scatter_add_rows`    ``(r, n)`` into ``(m, n)``           ``3 r n e``
:func:`scatter_add_cols`    ``(m, r)`` into ``(m, n)``           ``m r (64 + e)`` at most, ``m (2n + r) e`` at least
==========================  ===================================  ===========================================

Deterministic without atomics: the indices are sorted once (stably), the first of a run of equal ones sums the whole run
in that order in float32 and adds it to the destination, rounding once; the others do nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import kernel_op
from .language import cdiv, is_column_major, jit, narrowed, tile, tl


def scatter_add_rows(
    out: Tensor,
    indices: Tensor,
    x: Tensor,
    scale: Tensor | None = None,
    *,
    alpha: float = 1.0,
) -> Tensor:
    """``out[sigma_j] += alpha rho_j x_j`` in place; returns ``out``.

    Args:
        out: ``(m, n)``, any strides.
        indices: int64 ``(r,)``, each in ``[0, m)``. Kernels do not check the range.
        x: ``(r, n)``; a row's contributions are summed in float32.
        scale: ``(r,)``, ``rho``; ``None`` means ones.
        alpha: multiplies all.

    Raises:
        ValueError: ``x`` is not ``(r, n)``.
    """
    if x.shape != (indices.numel(), out.shape[1]):
        raise ValueError(f"x has shape {tuple(x.shape)}, must be {(indices.numel(), out.shape[1])}")
    _scatter_add_rows(out, indices.contiguous(), x, scale, alpha)
    return out


def scatter_add_cols(
    out: Tensor,
    indices: Tensor,
    x: Tensor,
    scale: Tensor | None = None,
    *,
    alpha: float = 1.0,
) -> Tensor:
    """``out[:, sigma_j] += alpha rho_j x[:, j]`` in place; otherwise as :func:`scatter_add_rows`."""
    return scatter_add_rows(out.t(), indices, x.t(), scale, alpha=alpha).t()


def _twin(out: Tensor, indices: Tensor, x: Tensor, scale: Tensor | None, alpha: float) -> None:
    wide = torch.promote_types(torch.promote_types(out.dtype, x.dtype), torch.float32)
    rows = x.to(wide) * alpha
    if scale is not None:
        rows = rows * scale.unsqueeze(1)
    targets, inverse = torch.unique(indices, return_inverse=True)
    sums = rows.new_zeros(targets.numel(), x.shape[1]).index_put_((inverse,), rows, accumulate=True)
    out.index_copy_(0, targets, sums.add_(out.index_select(0, targets)).to(out.dtype))


def _launch(out: Tensor, indices: Tensor, x: Tensor, scale: Tensor | None, alpha: float) -> None:
    r, n = x.shape
    indices, order = torch.sort(indices, stable=True)
    block_r, block_n = tile(r, n, rows_contiguous=is_column_major(out))
    _scatter_add_rows_kernel[cdiv(r, block_r), cdiv(n, block_n)](
        out, indices, order, x, scale, alpha, r, n, *out.stride(), *x.stride(), scale is not None, block_r, block_n
    )


@jit
def _scatter_add_rows_kernel(
    out,
    indices,
    order,
    x,
    scale,
    alpha,
    r,
    n,
    out_row,
    out_col,
    x_row,
    x_col,
    HAS_SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = position < r
    target = tl.load(indices + position, mask=first, other=0)
    before = tl.load(indices + position - 1, mask=first & (position > 0), other=-1)
    first = first & (before != target)
    total = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    live = first
    while tl.max(live.to(tl.int32), axis=0) > 0:  # one row of every run of the tile at a time
        row = tl.load(order + position, mask=live, other=0)
        inside = live[:, None] & (col < n)[None, :]
        value = tl.load(x + row[:, None] * x_row + col[None, :] * x_col, mask=inside, other=0.0).to(tl.float32)
        if HAS_SCALE:
            value *= tl.load(scale + row, mask=live, other=0.0).to(tl.float32)[:, None]
        total += value * alpha
        position += 1
        live = live & (position < r)
        live = live & (tl.load(indices + position, mask=live, other=-1) == target)
    inside = first[:, None] & (col < n)[None, :]
    place = out + target[:, None] * out_row + col[None, :] * out_col
    total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, narrowed(total, out.dtype.element_ty), mask=inside)


_scatter_add_rows = kernel_op(
    "scatter_add_rows(Tensor(a!) out, Tensor indices, Tensor x, Tensor? scale, float alpha) -> ()",
    twin=_twin,
    launch=_launch,
    fake=lambda out, indices, x, scale, alpha: None,
)
