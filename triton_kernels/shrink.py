r"""Weight decay of half-precision matrices with stochastic rounding: ``W <- factor W``, in one pass.

Rounding to nearest would lose factors closer to 1 than half the spacing of the type. The random bits are those of
stream 3; the counter of an element is its place ``i n + k``.

Floor: ``2 m n e`` bytes of ``e`` per element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import kernel_op
from .language import cdiv, is_column_major, jit, tile, tl
from .random_bits import (
    Stream,
    random_bits,
    random_bits_kernel,
    round_stochastically,
    round_stochastically_kernel,
)
from .together import batches_of_alike, from_table, located, table_of


def shrink_(matrices: Sequence[Tensor], factor: float, keys: Sequence[int]) -> None:
    """Multiply matrices in place, rounding stochastically; tensors of other than two dimensions by torch.

    Args:
        matrices: each ``(m, n)``, any strides, in half precision.
        factor: what they are multiplied by, in float32.
        keys: of the rounding of each, :func:`random_bits.make_key`.
    """
    for alike, own_keys in batches_of_alike((matrices,), (keys,)):
        (_shrink if alike[0].ndim == 2 else _twin)(alike, factor, own_keys)


def _twin(matrices: list[Tensor], factor: float, keys: list[int]) -> None:
    for matrix, key in zip(matrices, keys, strict=True):
        bits = random_bits(torch.arange(matrix.numel(), device=matrix.device).view(matrix.shape), key, Stream.DECAY)
        matrix.copy_(round_stochastically(matrix.float().mul_(factor), matrix.dtype, bits))


def _launch(matrices: list[Tensor], factor: float, keys: list[int]) -> None:
    table, aligned = table_of((matrices,), (keys,))
    (m, n), strides = matrices[0].shape, matrices[0].stride()
    block_m, block_n = tile(m, n, rows_contiguous=is_column_major(matrices[0]))
    grid = cdiv(m, block_m), cdiv(n, block_n), len(matrices)
    _shrink_kernel[grid](matrices[0], table, m, n, *strides, factor, aligned, block_m, block_n)


@jit
def _shrink_kernel(
    matrix, table, m, n, row_stride, col_stride, factor,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    place = located(matrix, table, 0, ALIGNED) + row * row_stride + col * col_stride
    inside = (row < m) & (col < n)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * factor
    bits = random_bits_kernel(row * n + col, from_table(table, 1), 3)
    tl.store(place, round_stochastically_kernel(value, matrix.dtype.element_ty, bits), mask=inside)


_shrink = kernel_op(
    "shrink_(Tensor(a!)[] matrices, float factor, int[] keys) -> ()", twin=_twin, launch=_launch, fake=lambda *_: None
)
