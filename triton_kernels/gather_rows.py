r"""Gather rows or columns: ``out[j] = rho_j x[sigma_j]``, optionally added to what ``out`` holds.

======================  ==========================  =======================================
operation               shapes                      floor, in bytes of ``e`` per element
======================  ==========================  =======================================
:func:`gather_rows`     ``(m, n) -> (r, n)``        ``2 r n e`` (``3 r n e`` accumulating)
:func:`gather_cols`     ``(m, n) -> (m, r)``        ``m r (32 + e)`` at most, ``m (n + r) e`` at least
======================  ==========================  =======================================

A GPU reads memory in sectors of 32 bytes: columns that lie further apart cost a sector each, and from about ``r = n e /
32`` evenly spread columns on, all of ``x``. There are no products to count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import kernel_op
from .language import cdiv, is_column_major, jit, narrowed, tile, tl


def gather_rows(
    x: Tensor,
    indices: Tensor,
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """``rho_j x[sigma_j]`` for every ``j``: ``(m, n) -> (r, n)``.

    Args:
        x: ``(m, n)``, any strides.
        indices: int64 ``(r,)``, each in ``[0, m)``, repetitions allowed. Kernels do not check the range.
        scale: ``(r,)``, ``rho``; ``None`` means ones.
        dtype: of the result, that of ``x`` by default; the product is taken in float32.
        out: ``(r, n)`` to write to instead of a new tensor, cast to its type.
        accumulate: add to ``out``, in float32, instead of overwriting it.

    Returns:
        ``out``, or a new tensor with rows contiguous where those of ``x`` are and columns where those are.

    Raises:
        ValueError: ``accumulate`` without ``out``, or an ``out`` of another shape.
    """
    shape = (indices.numel(), x.shape[1])
    if out is None:
        if accumulate:
            raise ValueError("accumulate=True needs out, the tensor to add to")
        out = empty_like_layout(x, shape, dtype or x.dtype)
    elif out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, must be {shape}")
    _gather_rows(out, x, indices.contiguous(), scale, accumulate)
    return out


def gather_cols(
    x: Tensor,
    indices: Tensor,
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """``rho_j x[:, sigma_j]``: ``(m, n) -> (m, r)``; otherwise as :func:`gather_rows`."""
    into = None if out is None else out.t()
    return gather_rows(x.t(), indices, scale, dtype=dtype, out=into, accumulate=accumulate).t()


def empty_like_layout(x: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """An uninitialised matrix, column-major where ``x`` is."""
    if is_column_major(x):
        return torch.empty(shape[::-1], dtype=dtype, device=x.device).t()
    return torch.empty(shape, dtype=dtype, device=x.device)


def _twin(out: Tensor, x: Tensor, indices: Tensor, scale: Tensor | None, accumulate: bool) -> None:
    rows = x.index_select(0, indices)
    if scale is not None:
        rows = rows.to(torch.promote_types(x.dtype, torch.float32)) * scale.unsqueeze(1)
    if accumulate:
        wide = torch.promote_types(torch.promote_types(rows.dtype, out.dtype), torch.float32)
        rows = rows.to(wide) + out
    out.copy_(rows)


def _launch(out: Tensor, x: Tensor, indices: Tensor, scale: Tensor | None, accumulate: bool) -> None:
    r, n = out.shape
    block_r, block_n = tile(r, n, rows_contiguous=is_column_major(out))
    _gather_rows_kernel[cdiv(r, block_r), cdiv(n, block_n)](
        out, x, indices, scale, r, n, *out.stride(), *x.stride(), scale is not None, accumulate, block_r, block_n
    )


@jit
def _gather_rows_kernel(
    out,
    x,
    indices,
    scale,
    r,
    n,
    out_row,
    out_col,
    x_row,
    x_col,
    HAS_SCALE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < r)[:, None] & (col < n)[None, :]
    source = tl.load(indices + row, mask=row < r, other=0)
    value = tl.load(x + source[:, None] * x_row + col[None, :] * x_col, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        value *= tl.load(scale + row, mask=row < r, other=0.0).to(tl.float32)[:, None]
    target = out + row[:, None] * out_row + col[None, :] * out_col
    if ACCUMULATE:
        value += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, narrowed(value, out.dtype.element_ty), mask=inside)


_gather_rows = kernel_op(
    "gather_rows(Tensor(a!) out, Tensor x, Tensor indices, Tensor? scale, bool accumulate) -> ()",
    twin=_twin,
    launch=_launch,
    fake=lambda out, x, indices, scale, accumulate: None,
)
