r"""Several matrices in one launch, which takes a host as long as that of one.

A table says where the arguments of each matrix lie: int64, a row of addresses for each argument, then rows of keys. The
kernel also gets the arguments of the first matrix, which it takes their types from. Programs of one matrix share their
third index.
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

    Yields:
        Of each batch the columns and keys, empty where there are none.

    Raises:
        ValueError: they are not equally many.
    """
    present = [column for column in columns if column is not None]
    layouts = [[(t.shape, t.stride(), t.dtype) for t in column] for column in present]
    kinds: dict[object, list[int]] = {}
    for i, kind in enumerate(zip([t.device for t in present[0]], *layouts, strict=True)):
        kinds.setdefault(kind, []).append(i)
    for places in kinds.values():
        for start in range(0, len(places), MOST):
            some = places[start : start + MOST]
            yield [[] if column is None else [column[i] for i in some] for column in (*columns, *keys)]


def table_of(columns: Sequence[list[Tensor]], keys: Sequence[list[int]] = ()) -> tuple[Tensor, int]:
    """The table of a launch on matrices that are alike, and bits that are set for arguments aligned to 16 bytes.

    Args:
        columns: the arguments that lie in several places, in the order in which the kernel counts them.
        keys: a key for each matrix and use, each less than 2^63.
    """
    count, rows, aligned = len(columns[0]), list[list[int]](), 0
    for i, column in enumerate(columns):
        rows.append([t.data_ptr() for t in column] or [0] * count)
        aligned |= (functools.reduce(operator.or_, rows[-1]) % 16 == 0) << i
    rows += [each or [0] * count for each in keys]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return table.to(columns[0][0].device, non_blocking=True), aligned  # not waited for: the host's memory is staged


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
    """The argument of this program's matrix, of the type of the first one's."""
    place = from_table(table, row).to(first.dtype)
    return tl.multiple_of(place, 16) if (ALIGNED >> row) & 1 else place
