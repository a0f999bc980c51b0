r"""Gather rows or columns: ``out[j] = x[sigma_j]``.

======================  ==========================  =======================================
operation               shapes                      floor, in bytes of ``e`` per element
======================  ==========================  =======================================
:func:`gather_rows`     ``(m, n) -> (r, n)``        ``2 r n e``
:func:`gather_cols`     ``(m, n) -> (m, r)``        ``m r (32 + e)`` at most, ``m (n + r) e`` at least
======================  ==========================  =======================================

A GPU reads memory in sectors of 32 bytes: columns that lie further apart cost a sector each, and from about ``r = n e /
32`` evenly spread columns on, all of ``x``. There are no products to count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import kernel_op
from .language import cdiv, is_column_major, jit, tile, tl


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """``x[sigma_j]`` for every ``j``: ``(m, n) -> (r, n)``.

    Args:
        x: ``(m, n)``, any strides; floating point or int8.
        indices: int64 ``(r,)``, each in ``[0, m)``, repetitions allowed. Kernels do not check the range.

    Returns:
        A new tensor with rows contiguous where those of ``x`` are and columns where those are.
    """
    rows: Tensor = _gather_rows(x, indices.contiguous())
    return rows


def gather_cols(x: Tensor, indices: Tensor) -> Tensor:
    """``x[:, sigma_j]``: ``(m, n) -> (m, r)``; otherwise as :func:`gather_rows`."""
    return gather_rows(x.t(), indices).t()


def _empty(x: Tensor, indices: Tensor) -> Tensor:
    """An uninitialised ``(r, n)``, column-major where ``x`` is."""
    r, n = indices.numel(), x.shape[1]
    return x.new_empty(n, r).t() if is_column_major(x) else x.new_empty(r, n)


def _twin(x: Tensor, indices: Tensor) -> Tensor:
    return _empty(x, indices).copy_(x.index_select(0, indices))


def _launch(x: Tensor, indices: Tensor) -> Tensor:
    out = _empty(x, indices)
    r, n = out.shape
    block_r, block_n = tile(r, n, rows_contiguous=is_column_major(out))
    _gather_rows_kernel[cdiv(r, block_r), cdiv(n, block_n)](
        out, x, indices, r, n, *out.stride(), *x.stride(), block_r, block_n
    )
    return out


@jit
def _gather_rows_kernel(
    out, x, indices, r, n, out_row, out_col, x_row, x_col, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < r)[:, None] & (col < n)[None, :]
    source = tl.load(indices + row, mask=row < r, other=0)
    value = tl.load(x + source[:, None] * x_row + col[None, :] * x_col, mask=inside, other=0)
    tl.store(out + row[:, None] * out_row + col[None, :] * out_col, value, mask=inside)


_gather_rows = kernel_op(
    "gather_rows(Tensor x, Tensor indices) -> Tensor",
    twin=_twin,
    launch=_launch,
    fake=_empty,
    types=frozenset({torch.int8}),
)
