r"""The move of explored rows by :mod:`grass.kernels`; formulas in :mod:`grass.exploration`.

:class:`grass.cpu_kernel.Batch` does it for float32 weights on the CPU, in the call that steps the selected rows.

Floor if all rows move, ``dim=1``, float32: ``G`` read twice, ``W`` and both moments read and written, ``16mn + 16mr``
bytes, where AdamW moves ``28mn`` (``dim=0`` reads ``G`` once). In compact mode, for ``q`` explored rows of ``n``
values: gradient and values read, values and weight written, ``16qn`` bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grass import kernels
from grass.precision import read_moments
from grass.projector import Projector
from grass.shards import local, summed
from grass.steps.group import GroupStep, Numbers
from grass.steps.rows import Rows


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
        norms = kernels.row_norms(own * factors.unsqueeze(dim), dim)
        squares = summed(torch.cat([norms, lengths]).square(), explored.grad)
        norms, lengths = torch.split(squares.sqrt(), [norms.numel(), lengths.numel()])
    size = numbers.step_size * explored.reach
    kernels.move_rows_(
        weight,
        indices,
        grad,
        factors,
        lengths.mean(),
        step_size=-size if step.group["maximize"] else size,
        dim=dim,
        rows=None if weight is explored.values else explored.values,
        norms=norms,
        gather_grad=gathering,
        key=_key(step, rows),
    )


def explored_directions(
    direction: Tensor, grad: Tensor, explored_grad: Tensor, dim: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Which way explored rows move, ``U``, and the factors that make them as long as the selected rows' mean.

    Args:
        direction: ``D (r, n)`` of the selected rows, or ``(m, r)``.
        grad: their gradient, of the same shape.
        explored_grad: the gradient of explored rows, ``(q, n)`` or ``(m, q)``.
        dim: 0 for rows, 1 for columns.
        like: the gradient as it is sharded over the ranks; lengths are summed over them.

    Returns:
        ``U`` and ``mean_k |D_k| / |U_i|``, ``(q,)``, 0 where ``U_i`` is zero.
    """
    phi = _quotients(_norms(direction, 1 - dim), _norms(grad, 1 - dim))
    unit = explored_grad * phi.unsqueeze(dim)
    squares = torch.cat([_norms(unit, dim), _norms(direction, dim)]).square()
    lengths, selected = torch.split(summed(squares, like).sqrt(), [unit.shape[dim], direction.shape[dim]])
    return unit, _quotients(selected.mean(), lengths)


def _factors(step: GroupStep, rows: Rows, row_steps: Tensor | int) -> tuple[Tensor, Tensor]:
    """``phi`` and ``|D_k|``, from moments that this step has updated; 8-bit ones are decoded first."""
    state, group = rows.state, step.group
    moments = read_moments(state) if "exp_avg_scale" in state else (state["exp_avg"], state["exp_avg_sq"])
    indices = rows.indices if rows.values is None else None
    options = {"dim": rows.dim, "betas": group["betas"], "eps": group["eps"]}
    factors, lengths = kernels.move_factors(*moments, rows.grad, row_steps, indices=indices, **options)
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


def _norms(matrix: Tensor, dim: int) -> Tensor:
    norms: Tensor = kernels.row_norms(matrix, dim)
    return norms


def _quotients(norms: Tensor, by: Tensor) -> Tensor:
    """0 where it would be divided by nothing."""
    return torch.where(by > 0, norms / by, 0.0)
