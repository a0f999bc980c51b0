"""Triton where it is installed; without it the package still imports, and every operation runs its torch twin."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on CPU tensors: settled when they are defined."""


def jit(kernel: Callable[..., Any]) -> Any:
    """``triton.jit`` where there is Triton."""
    return kernel if triton is None else triton.jit(kernel)


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``: tiles have such sizes."""
    return 1 << max(0, n - 1).bit_length()


def tile(rows: int, columns: int, rows_contiguous: bool, elements: int = 2048, run: int = 1024) -> tuple[int, int]:
    """Tile of a ``(rows, columns)`` matrix: long where memory is contiguous, along rows or along columns.

    Args:
        rows: of the matrix.
        columns: of the matrix.
        rows_contiguous: whether neighbours in memory are one row apart, as in a transposed matrix.
        elements: of the tile, about.
        run: longest stretch along contiguous memory.
    """
    if rows_contiguous:
        block = min(power_of_two(rows), run // 4)
        return block, min(power_of_two(columns), max(1, elements // block))
    block = min(power_of_two(columns), run)
    return min(power_of_two(rows), max(1, elements // block)), block


def is_column_major(matrix: Tensor) -> bool:
    """Whether columns are contiguous in memory: such a matrix is handled as its transpose."""
    return matrix.stride(0) == 1 and matrix.stride(1) > 1


def logarithm(beta: float) -> float:
    """``log(beta)`` as kernels take it: finite for 0 too."""
    return math.log(beta) if beta > 0 else -1e30


CUTS_OFF = tl and tl.constexpr(INTERPRETED)
"""The interpreter casts float32 to bfloat16 by cutting off the last 16 bits; GPUs round to nearest."""


@jit
def narrowed(x, dtype: tl.constexpr):
    """``x``, float32, rounded to the nearest of ``dtype``, to even where two are."""
    if CUTS_OFF and dtype == tl.bfloat16:
        raw = x.to(tl.uint32, bitcast=True)
        raised = tl.where((raw & 0x7F800000) == 0x7F800000, raw, raw + 0x7FFF + ((raw >> 16) & 1))
        return (raised & 0xFFFF0000).to(tl.float32, bitcast=True).to(dtype)
    return x.to(dtype)
