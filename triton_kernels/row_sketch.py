r"""A Johnson-Lindenstrauss sketch of a gradient that is never formed: ``A^T (B S)`` for ``G = A^T B``.

``A (b, k), B (b, l) -> (k, s)``: with ``S (l, s)`` of independent signs over ``sqrt(s)`` the norm of a sketched row is,
in the root mean square, that of the row of ``G``.

Floor: ``b (k + l) e`` bytes of ``e`` per element, ``l s e`` of signs and ``4 k s``; ``2 b s (k + l)`` FLOPs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import kernel_op
from .language import INTERPRETED, cdiv, jit, narrowed, power_of_two, tl

TILES = 8 if INTERPRETED else 256
"""Programs wanted at least."""


def row_sketch(kept: Tensor, mixed: Tensor, signs: Tensor) -> Tensor:
    """``kept^T (mixed S)`` in float32: ``(b, k), (b, l) -> (k, s)``.

    Args:
        kept: the operand whose features keep their place, ``(b, k)``.
        mixed: the operand whose features are mixed, ``(b, l)``, of the same type.
        signs: ``S (l, s)``.
    """
    sketch: Tensor = _row_sketch(kept, mixed, signs)
    return sketch


def _twin(kept: Tensor, mixed: Tensor, signs: Tensor) -> Tensor:
    kept, mixed = kept.contiguous(), mixed.contiguous()  # torch multiplies strided bfloat16 wrongly on some CPUs
    wide = torch.promote_types(kept.dtype, torch.float32) if kept.dtype == torch.float16 else kept.dtype
    return (kept.to(wide).t() @ (mixed.to(wide) @ signs.to(wide))).float()


def _launch(kept: Tensor, mixed: Tensor, signs: Tensor) -> Tensor:
    (t, n), size = mixed.shape, signs.shape[1]
    wide = mixed.dtype == torch.float16  # norms leave its range before their elements do
    projected = torch.empty(t, size, dtype=torch.float32 if wide else mixed.dtype, device=mixed.device)
    block_s = max(16, power_of_two(size))
    block_t, block_n = (32, 32) if mixed.dtype == torch.float32 or wide else (64, 64)  # registers
    _project_kernel[(cdiv(t, block_t),)](
        projected, mixed, signs, t, n, size, *mixed.stride(), *signs.stride(), wide or INTERPRETED,
        block_t, block_s, block_n,
    )  # fmt: skip
    return _transposed_product(kept, projected, wide)


@jit
def _project_kernel(
    out, x, signs, t, n, size, x_row, x_col, signs_row, signs_col,
    WIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    sample = tl.arange(0, BLOCK_S)
    total = tl.zeros([BLOCK_T, BLOCK_S], dtype=tl.float32)
    for start in range(0, n, BLOCK_N):
        feature = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (token < t)[:, None] & (feature < n)[None, :]
        value = tl.load(x + token[:, None] * x_row + feature[None, :] * x_col, mask=inside, other=0.0)
        place = signs + feature[:, None] * signs_row + sample[None, :] * signs_col
        s = tl.load(place, mask=(feature < n)[:, None] & (sample < size)[None, :], other=0.0)
        if WIDE:
            value = value.to(tl.float32)
        total = tl.dot(value, s.to(value.dtype), total, input_precision="ieee")
    place = out + token[:, None] * size + sample[None, :]
    tl.store(place, narrowed(total, out.dtype.element_ty), mask=(token < t)[:, None] & (sample < size)[None, :])


def _transposed_product(a: Tensor, b: Tensor, wide: bool) -> Tensor:
    """``a^T b`` in float32: ``(t, r), (t, n) -> (r, n)``; ``wide`` multiplies half precision in float32.

    Where there are few tiles, programs share the tokens; their partial sums are added in a fixed order.
    """
    (t, r), n = a.shape, b.shape[1]
    block_r, block_n, block_t = min(128, max(16, power_of_two(r))), min(128, max(16, power_of_two(n))), 64
    if wide or a.dtype == torch.float32:
        block_r, block_n, block_t = min(block_r, 64), min(block_n, 64), 32
    tiles = cdiv(r, block_r) * cdiv(n, block_n)
    splits = max(1, min(cdiv(TILES, tiles), cdiv(t, 8 * block_t)))
    out = torch.empty(splits, r, n, dtype=torch.float32, device=a.device)
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 and not INTERPRETED else "ieee"
    flags = wide or INTERPRETED, precision  # the interpreter does not multiply bfloat16
    _transposed_product_kernel[tiles, splits](
        out, a, b, r, n, t, cdiv(t, splits), *a.stride(), *b.stride(), *flags, block_r, block_n, block_t,
        num_warps=8 if block_r * block_n >= 128 * 128 else 4, num_stages=3,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(0)


@jit
def _transposed_product_kernel(
    out, a, b, r, n, t, share, a_row, a_col, b_row, b_col,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    row = (tile // tiles_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = (tile % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    begin = split * share
    end = tl.minimum(begin + share, t)
    total = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T).to(tl.int64)
        there = token < end
        left = tl.load(
            a + token[:, None] * a_row + row[None, :] * a_col, mask=there[:, None] & (row < r)[None, :], other=0.0
        )
        right = tl.load(
            b + token[:, None] * b_row + col[None, :] * b_col, mask=there[:, None] & (col < n)[None, :], other=0.0
        )
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    place = out + split * r * n + row[:, None] * n + col[None, :]
    tl.store(place, total, mask=(row < r)[:, None] & (col < n)[None, :])


_row_sketch = kernel_op(
    "row_sketch(Tensor kept, Tensor mixed, Tensor signs) -> Tensor",
    twin=_twin,
    launch=_launch,
    fake=lambda kept, mixed, signs: kept.new_empty(kept.shape[1], signs.shape[1], dtype=torch.float32),
)
