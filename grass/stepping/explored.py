r"""The move of explored rows by :mod:`grass.kernels`; formulas in :mod:`grass.selection.exploration`.

:class:`grass.cpu.kernel.Batch` does it for float32 weights on the CPU, in the call that steps the selected rows.

Floor if all rows move, ``dim=1``, float32: ``G`` read twice, ``W`` and both moments read and written, ``16mn + 16mr``
bytes, where AdamW moves ``28mn`` (``dim=0`` reads ``G`` once). In compact mode, for ``q`` explored rows of ``n``
values: gradient and values read, values and weight written, ``16qn`` bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grass.kernels import move_factors, move_rows_, row_norms
from grass.parallel.shards import local, summed
from grass.selection.projector import Projector
from grass.state.precision import read_moments
from grass.stepping.group import GroupStep, Numbers
from grass.stepping.rows import Rows


def step_explored(step: GroupStep, rows: Rows, numbers: Numbers) -> None:
    """Move the explored rows of a weight; call it after the selected ones have been stepped."""
    explored, dim, gathering = rows.explored, rows.dim, rows.values is None
    assert explored is not None
    factors, lengths = _factors(step, rows, numbers.row_steps)
    weight, indices = _places(rows)
    grad = rows.grad if gathering else local(explored.grad)
    norms = None
    if type(explored.grad) is not Tensor:  # sharded along the width: lengths are summed over the ranks
        own = Projector(indices, None, dim).gather(grad) if gathering else grad
        norms = row_norms(own * factors.unsqueeze(dim), dim)
        squares = summed(torch.cat([norms, lengths]).square(), explored.grad)
        norms, lengths = torch.split(squares.sqrt(), [norms.numel(), lengths.numel()])
    size = numbers.step_size * explored.reach
    move_rows_(
        weight,
        indices,
        grad,
        factors,
        lengths.mean(),
        step_size=-size if step.options.maximize else size,
        dim=dim,
        rows=None if weight is explored.values else explored.values,
        norms=norms,
        gather_grad=gathering,
        key=_key(step, rows),
    )


def _factors(step: GroupStep, rows: Rows, row_steps: Tensor | int) -> tuple[Tensor, Tensor]:
    """``phi`` and ``|D_k|``, from moments that this step has updated; 8-bit ones are decoded first."""
    state, options = rows.state, step.options
    moments = read_moments(state) if "exp_avg_scale" in state else (state["exp_avg"], state["exp_avg_sq"])
    indices = rows.indices if rows.values is None else None
    numbers = {"dim": rows.dim, "betas": options.betas, "eps": options.eps}
    factors, lengths = move_factors(*moments, rows.grad, row_steps, indices=indices, **numbers)
    return factors, lengths


def _places(rows: Rows) -> tuple[Tensor, Tensor]:
    """The matrix whose rows move, and which do; if active rows have no matrix here, it is that of their values."""
    explored = rows.explored
    assert explored is not None
    if rows.weight is None:
        assert explored.values is not None
        return explored.values, torch.arange(explored.values.shape[rows.dim], device=explored.values.device)
    indices = _unselected(rows.indices, rows.weight.shape[rows.dim]) if explored.indices is None else explored.indices
    return rows.weight, indices


def _unselected(indices: Tensor, size: int) -> Tensor:
    """All rows but those of ``indices``, ascending; without reading how many there are from the device."""
    others = torch.ones(size, dtype=torch.uint8, device=indices.device).index_fill_(0, indices, 0)
    return others.sort(descending=True, stable=True).indices[: size - indices.numel()]


def _key(step: GroupStep, rows: Rows) -> int | None:
    """The key of stochastic rounding: a weight narrower than its active rows has one always, or it would lose moves."""
    values, weight = rows.values, rows.weight
    if values is not None and weight is not None and weight.dtype.itemsize < values.dtype.itemsize:
        return step.key(rows.index, rows.state)
    return step.value_key(rows.index, rows.state)
