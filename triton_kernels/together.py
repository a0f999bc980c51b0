r"""Several matrices in one launch, which takes a host as long as that of one.

A launch gets the tensors of the first matrix as arguments. Where those of the others lie, a table tells: int64, a row
of ``(address - address of the first) / bytes of an element`` for each argument, then rows of keys. Programs of one
matrix share their third index.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .language import jit, tl

MOST = 2**15
"""Most matrices of a launch: less than 2^16, the limit of a grid's third dimension."""

Column = Sequence[Tensor] | None
"""One argument of every matrix; ``None``: they have none."""

Keys = Sequence[int] | None
"""A key of every matrix."""


def batches_of_alike(columns: Sequence[Column], keys: Sequence[Keys] = ()) -> Iterator[list[list[Any]]]:
    """Divide matrices into those whose arguments have the same shapes, strides, types and device, in their order.

    Args:
        columns: the same argument of every matrix.
        keys: of every matrix.

    Returns:
        Of each batch the columns and keys, empty where there are none.

    Raises:
        ValueError: they are not equally many.
    """
    present = [column for column in columns if column is not None]
    kinds: dict[object, list[int]] = {}
    for i, tensors in enumerate(zip(*present, strict=True)):
        kinds.setdefault((tensors[0].device, *((t.shape, t.stride(), t.dtype) for t in tensors)), []).append(i)
    for places in kinds.values():
        for start in range(0, len(places), MOST):
            some = places[start : start + MOST]
            yield [[] if column is None else [column[i] for i in some] for column in (*columns, *keys)]


def table_of(columns: Sequence[list[Tensor]], keys: Sequence[list[int]] = ()) -> tuple[Tensor, bool]:
    """The table of a launch on matrices that are alike, and whether all its distances are multiples of 16.

    Those of tensors without dimensions do not count: kernels load one value of them.

    Args:
        columns: the arguments that lie in several places, in the order in which the kernel counts them.
        keys: a key for each matrix and use, each less than 2^63.
    """
    count, rows, odd = len(columns[0]), list[list[int]](), 0
    for column in columns:
        places = [0] * count
        if column and count > 1:
            start, size = column[0].data_ptr(), column[0].element_size()
            places = [(t.data_ptr() - start) // size for t in column]
            if column[0].ndim:
                odd |= functools.reduce(operator.or_, places)
        rows.append(places)
    rows += [each or [0] * count for each in keys]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    table = table.to(columns[0][0].device, non_blocking=True)  # not waited for: memory that is not pinned is staged
    return table, odd % 16 == 0


def first_of(columns: Sequence[list[Tensor]], dim: int) -> list[Any]:
    """The arguments of the first matrix, matrices transposed for ``dim=1``; ``None`` where there are none."""
    first = [column[0] if column else None for column in columns]
    return [t.t() if dim == 1 and t is not None and t.ndim == 2 else t for t in first]


@jit
def from_table(table, row: tl.constexpr):
    """The entry of this program's matrix in a row of the table."""
    return tl.load(table + row * tl.num_programs(2) + tl.program_id(2))


@jit
def located(first, table, row: tl.constexpr, ALIGNED: tl.constexpr):
    """The argument of this program's matrix, given that of the first."""
    distance = from_table(table, row)
    return first + (tl.multiple_of(distance, 16) if ALIGNED else distance)
