r"""Copy the chosen rows of several weights into tensors of their own: ``w_j <- W[sigma_j]``, in one launch.

Floor: ``q n (e + f)`` bytes for rows of ``e`` bytes a value copied into ``f`` bytes. Columns of a row-major weight take
32 bytes a value where they lie further apart than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import kernel_op
from .language import cdiv, is_column_major, jit, narrowed, tile, tl
from .layout import gather
from .together import batches_of_alike, first_of, located, table_of


def reload_rows_(rows: Sequence[Tensor], weights: Sequence[Tensor], indices: Sequence[Tensor], *, dim: int = 0) -> None:
    """Copy chosen rows (``dim=1``: columns) of each weight into ``rows``, cast to their type.

    Args:
        rows: of each weight ``(q, n)`` (``(m, q)``), any strides.
        weights: each ``(m, n)``, any strides.
        indices: of each int64 ``(q,)``, in ``[0, m)`` (``[0, n)``), repetitions allowed. Kernels do not check.
        dim: 0 for rows, 1 for columns.
    """
    for alike in batches_of_alike((rows, weights, indices)):
        _reload_rows(*alike, dim)


def _twin(rows: list[Tensor], weights: list[Tensor], indices: list[Tensor], dim: int) -> None:
    for own, weight, chosen in zip(rows, weights, indices, strict=True):
        gather(weight, chosen, dim, out=own)


def _launch(rows: list[Tensor], weights: list[Tensor], indices: list[Tensor], dim: int) -> None:
    columns = rows, weights, indices
    table, aligned = table_of(columns)
    own, weight, chosen = first_of(columns, dim)
    q, n = own.shape
    block_q, block_n = tile(q, n, rows_contiguous=is_column_major(weight))
    _reload_rows_kernel[cdiv(q, block_q), cdiv(n, block_n), len(rows)](
        own, weight, chosen, table, q, n, *own.stride(), *weight.stride(), aligned, block_q, block_n
    )


@jit
def _reload_rows_kernel(
    rows, weight, indices, table, q, n, row, col, weight_row, weight_col,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    j = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    there = i < q
    source = tl.load(located(indices, table, 2, ALIGNED) + i, mask=there, other=0)[:, None]
    inside = there[:, None] & (j < n)
    weight = located(weight, table, 1, ALIGNED)
    value = tl.load(weight + source * weight_row + j * weight_col, mask=inside, other=0.0).to(tl.float32)
    place = located(rows, table, 0, ALIGNED) + i[:, None] * row + j * col
    tl.store(place, narrowed(value, rows.dtype.element_ty), mask=inside)


_reload_rows = kernel_op(
    "reload_rows_(Tensor(a!)[] rows, Tensor[] weights, Tensor[] indices, int dim) -> ()",
    twin=_twin,
    launch=_launch,
    fake=lambda *_: None,
)
