r"""The compact weight gradient: for tokens ``t``, ``out[j, k] = sum_t g[t, sigma_j] x[t, k]`` (``dim=0``) or its like.

=======  ==================================  ==========================================================
dim      product, from ``g (b, m), x (b, n)``  floor: FLOPs, and bytes of ``e`` per element
=======  ==================================  ==========================================================
0        ``g[:, sigma]^T x``, ``(r, n)``     ``2 b r n``; ``b n e``, what the gather reads, ``r n e``
1        ``g^T x[:, sigma]``, ``(m, r)``     ``2 b r m``; ``b m e``, what the gather reads, ``m r e``
=======  ==================================  ==========================================================

The kernel gathers as it loads the operand, so that no compact copy of ``(b, r)`` exists; it accumulates in float32 and
rounds once. Where there are few tiles, tokens are split over programs, whose partial sums are added in a fixed order.

A GPU reads sectors of 32 bytes: every block of 128 output columns reads the gathered operand anew, up to 32 bytes per
element, mostly from the cache. A separate gather reads it once. So the kernel is the better way where the output
is narrow, gather and matrix product elsewhere (:func:`fused_pays`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import kernel_op
from .gather_rows import gather_cols
from .language import INTERPRETED, cdiv, jit, narrowed, power_of_two, tl

TILES = 8 if INTERPRETED else 256
"""Programs wanted at least."""
WIDE_SECTOR = 32 // 2
"""Elements of half precision in a sector of memory."""


def compact_grad(g: Tensor, x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """The rows (``dim=0``) or columns (``dim=1``) ``indices`` of ``g^T x``, by the faster way for their shapes.

    Args:
        g: output gradient ``(b, m)``.
        x: input ``(b, n)``, of the same type.
        indices: int64 ``(r,)``, each in ``[0, m)`` (``dim=1``: ``[0, n)``). Kernels do not check the range.
        dim: 0 for rows, 1 for columns.

    Returns:
        ``(r, n)`` contiguous, or ``(m, r)`` with columns contiguous, in the type of the operands.
    """
    picked, other = (g, x) if dim == 0 else (x, g)
    product: Tensor = _compact_grad(picked, other, indices)
    return product if dim == 0 else product.t()


def fused_pays(r: int, n: int) -> bool:
    """Whether gathering in the load moves less than gathering once, for ``r`` picked against ``n`` other features.

    By the model above, untested on a GPU: reading the gathered operand once per 128 columns of output, a sector an
    element, against once plus a copy written and read.
    """
    return cdiv(n, 128) * WIDE_SECTOR <= WIDE_SECTOR + 2 or r <= 16


def _twin(picked: Tensor, other: Tensor, indices: Tensor) -> Tensor:
    return picked.index_select(1, indices).t() @ other


def _launch(picked: Tensor, other: Tensor, indices: Tensor) -> Tensor:
    if fused_pays(indices.numel(), other.shape[1]):
        return transposed_product(picked, other, indices.contiguous(), picked.dtype)
    return gather_cols(picked, indices).t() @ other


def transposed_product(
    a: Tensor, b: Tensor, indices: Tensor | None, dtype: torch.dtype, splits: int = 0, wide: bool = False
) -> Tensor:
    """``a[:, sigma]^T b``: ``(t, k), (t, n) -> (r, n)``, by the kernel.

    Args:
        a: ``(t, k)``.
        b: ``(t, n)``.
        indices: ``sigma``, int64 ``(r,)``; ``None`` is all of them.
        dtype: of the result.
        splits: programs to share the tokens; 0 is chosen by the number of tiles.
        wide: multiply in float32 whatever the operands are.
    """
    (t, k), n = a.shape, b.shape[1]
    r = k if indices is None else indices.numel()
    block_r, block_n, block_t = min(128, max(16, power_of_two(r))), min(128, max(16, power_of_two(n))), 64
    if wide or a.dtype == torch.float32:
        block_r, block_n, block_t = min(block_r, 64), min(block_n, 64), 32
    tiles = cdiv(r, block_r) * cdiv(n, block_n)
    splits = splits or max(1, min(cdiv(TILES, tiles), cdiv(t, 8 * block_t)))
    out = torch.empty(splits, r, n, dtype=dtype if splits == 1 else torch.float32, device=a.device)
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 and not INTERPRETED else "ieee"
    flags = indices is not None, wide or INTERPRETED, precision  # the interpreter does not multiply bfloat16
    _transposed_product_kernel[tiles, splits](
        out, a, indices, b, r, n, t, cdiv(t, splits), *a.stride(), *b.stride(), *flags, block_r, block_n, block_t,
        num_warps=8 if block_r * block_n >= 128 * 128 else 4, num_stages=3,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(0).to(dtype)


@jit
def _transposed_product_kernel(
    out, a, indices, b, r, n, t, share, a_row, a_col, b_row, b_col,
    GATHER: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    row = (tile // tiles_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = (tile % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    begin = split * share
    end = tl.minimum(begin + share, t)
    source = row
    if GATHER:
        source = tl.load(indices + row, mask=row < r, other=0)
    total = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T).to(tl.int64)
        there = token < end
        left = tl.load(
            a + token[:, None] * a_row + source[None, :] * a_col, mask=there[:, None] & (row < r)[None, :], other=0.0
        )
        right = tl.load(
            b + token[:, None] * b_row + col[None, :] * b_col, mask=there[:, None] & (col < n)[None, :], other=0.0
        )
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    place = out + split * r * n + row[:, None] * n + col[None, :]
    tl.store(place, narrowed(total, out.dtype.element_ty), mask=(row < r)[:, None] & (col < n)[None, :])


_compact_grad = kernel_op(
    "compact_grad(Tensor picked, Tensor other, Tensor indices) -> Tensor",
    twin=_twin,
    launch=_launch,
    fake=lambda picked, other, indices: picked.new_empty(indices.numel(), other.shape[1]),
)
