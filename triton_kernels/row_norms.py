r"""Norms of all rows or all columns of a dense gradient in one pass: ``norm_i = sqrt(sum_j x_ij^2)``, in float32.

``(m, n) -> (m,)`` for ``dim=0``, ``(n,)`` for ``dim=1``. Floor: ``m n e`` bytes of ``e`` per element, ``2 m n`` FLOPs.

Each program sums a block of rows over a share of the columns; where there are too few blocks to fill the GPU the
columns are split, and the partial sums are added in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import kernel_op
from .language import INTERPRETED, cdiv, is_column_major, jit, tile, tl

PROGRAMS = 4 if INTERPRETED else 1024
"""Programs wanted at least: several for each of a GPU's hundred-odd multiprocessors."""


def row_norms(x: Tensor, dim: int = 0) -> Tensor:
    """Euclidean norms of the rows (``dim=0``) or columns (``dim=1``) of ``x (m, n)``, which may have any strides.

    Raises:
        ValueError: ``dim`` is neither 0 nor 1.
    """
    if dim not in (0, 1):
        raise ValueError(f"Invalid {dim=}: must be 0 (rows) or 1 (columns)")
    norms: Tensor = _row_norms(x if dim == 0 else x.t())
    return norms


def _twin(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32))


def _launch(x: Tensor) -> Tensor:
    m, n = x.shape
    block_m, block_n = tile(m, n, rows_contiguous=is_column_major(x), elements=4096)
    splits = max(1, min(cdiv(PROGRAMS, cdiv(m, block_m)), cdiv(n, 4 * block_n)))
    partial = torch.empty(splits, m, dtype=torch.float32, device=x.device)
    share = cdiv(n, splits)
    _row_norms_kernel[cdiv(m, block_m), splits](partial, x, m, n, share, *x.stride(), block_m, block_n)
    return (partial[0] if splits == 1 else partial.sum(0)).sqrt_()


@jit
def _row_norms_kernel(partial, x, m, n, share, x_row, x_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.program_id(1).to(tl.int64) * share
    end = tl.minimum(begin + share, n)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (row < m)[:, None] & (col < end)[None, :]
        value = tl.load(x + row[:, None] * x_row + col[None, :] * x_col, mask=inside, other=0.0).to(tl.float32)
        total += value * value
    tl.store(partial + tl.program_id(1).to(tl.int64) * m + row, tl.sum(total, axis=1), mask=row < m)


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))


_row_norms = kernel_op("row_norms(Tensor x) -> Tensor", twin=_twin, launch=_launch, fake=_fake)
