r"""Weight decay of a half-precision matrix with stochastic rounding: ``W <- factor W``, in one pass.

Rounding to nearest would lose factors closer to 1 than half the spacing of the type. The random bits are those of
stream 3; the counter of an element is its place ``i n + k``.

Floor: ``2 m n e`` bytes of ``e`` per element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import kernel_op
from .language import cdiv, is_column_major, jit, tile, tl
from .random_bits import (
    Stream,
    key_words,
    random_bits,
    random_bits_kernel,
    round_stochastically,
    round_stochastically_kernel,
)


def shrink_(matrix: Tensor, factor: float, key: int) -> None:
    """Multiply a matrix in place, rounding stochastically; tensors of other than two dimensions by torch.

    Args:
        matrix: ``(m, n)``, any strides, in half precision.
        factor: what it is multiplied by, in float32.
        key: of the rounding, :func:`random_bits.make_key`.
    """
    (_shrink if matrix.ndim == 2 else _twin)(matrix, factor, key)


def _twin(matrix: Tensor, factor: float, key: int) -> None:
    bits = random_bits(torch.arange(matrix.numel(), device=matrix.device).view(matrix.shape), key, Stream.DECAY)
    matrix.copy_(round_stochastically(matrix.float().mul_(factor), matrix.dtype, bits))


def _launch(matrix: Tensor, factor: float, key: int) -> None:
    m, n = matrix.shape
    block_m, block_n = tile(m, n, rows_contiguous=is_column_major(matrix))
    grid, words = (cdiv(m, block_m), cdiv(n, block_n)), key_words(key, Stream.DECAY)
    _shrink_kernel[grid](matrix, m, n, *matrix.stride(), factor, *words, block_m, block_n)


@jit
def _shrink_kernel(
    matrix, m, n, row_stride, col_stride, factor, key_low, key_high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    place, inside = matrix + row * row_stride + col * col_stride, (row < m) & (col < n)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * factor
    bits = random_bits_kernel(row * n + col, key_low, key_high)
    tl.store(place, round_stochastically_kernel(value, matrix.dtype.element_ty, bits), mask=inside)


_shrink = kernel_op(
    "shrink_(Tensor(a!) matrix, float factor, int key) -> ()", twin=_twin, launch=_launch, fake=lambda *_: None
)
