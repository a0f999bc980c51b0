r"""The move of explored rows by torch's operators; formulas in :mod:`grass.exploration`.

:class:`grass.cpu_kernel.Batch` does it for float32 weights on the CPU, in the call that steps the selected rows.

Floor of the kernel if all rows move, ``dim=1``, float32: ``G`` read twice, ``W`` and both moments read and written,
``16mn + 16mr`` bytes, where AdamW moves ``28mn`` (``dim=0`` reads ``G`` once). In compact mode, for ``q`` explored rows
of ``n`` values: gradient and values read, values and weight written, ``16qn`` bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grass import kernels
from grass.functional import StepCoefficients
from grass.precision import add_product_, read_moments, rounded
from grass.projector import Projector
from grass.shards import local, summed
from grass.steps.group import GroupStep, Numbers
from grass.steps.rows import Rows


def step_explored(step: GroupStep, rows: Rows, numbers: Numbers) -> None:
    """Move the explored rows of a weight; call it after the selected ones have been stepped."""
    explored, dim = rows.explored, rows.dim
    assert explored is not None
    grad = rows.grad if rows.values is not None else Projector(rows.indices, None, dim).gather(rows.grad)
    direction = _direction(step, rows, numbers.row_steps)
    moving, own = _moving(rows)
    unit, lengths = explored_directions(direction, grad, moving, dim, explored.grad)
    if explored.indices is None:
        lengths.index_fill_(0, rows.indices, 0.0)
    size = numbers.step_size * explored.reach
    size = size if step.group["maximize"] else -size
    factors = lengths.unsqueeze(1 - dim)
    if own is not None:
        own.copy_(own.to(unit.dtype).addcmul_(unit, factors, value=size)) if own.dtype == unit.dtype else add_product_(
            own, unit, factors, size, step.value_key(rows.index, rows.state)
        )
        _write(step, rows, own)
        return
    weight = rows.stepped()
    key = step.value_key(rows.index, rows.state)
    if explored.indices is None:
        add_product_(weight, unit, factors, size, key)
        return
    projector = Projector(explored.indices, None, dim)
    values = projector.gather(weight)
    add_product_(values, unit, factors, size, key)
    projector.scatter_(weight, values)


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
    norms = summed(squares, like).sqrt()
    lengths, selected = norms[: unit.shape[dim]], norms[unit.shape[dim] :]
    return unit, _quotients(selected.mean(), lengths)


def _moving(rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Gradients of the explored rows, and their values where these are a tensor of their own."""
    explored = rows.explored
    assert explored is not None
    grad = local(explored.grad)
    if explored.values is not None:
        return grad, explored.values
    grad = grad if grad.ndim == 2 else grad.reshape(grad.shape[0], -1)
    return (grad if explored.indices is None else Projector(explored.indices, None, rows.dim).gather(grad)), None


def _write(step: GroupStep, rows: Rows, values: Tensor) -> None:
    """Write moved active rows into the weight; a narrower weight is rounded stochastically, or it would lose them."""
    if rows.weight is None:
        return
    explored = rows.explored
    assert explored is not None
    assert explored.indices is not None
    narrower = rows.weight.dtype.itemsize < values.dtype.itemsize
    key = step.key(rows.index, rows.state) if narrower else None
    Projector(explored.indices, None, rows.dim).scatter_(rows.weight, rounded(values, rows.weight.dtype, key))


def _direction(step: GroupStep, rows: Rows, row_steps: Tensor | int) -> Tensor:
    """``D (r, n)``, from moments that this step has updated."""
    exp_avg, exp_avg_sq = read_moments(rows.state)
    c = StepCoefficients.at(row_steps, 1.0, step.group["betas"]).along(rows.dim)
    root = exp_avg_sq.sqrt().div_(c.denominator).add_(step.group["eps"]).div_(c.step_size)
    return torch.div(exp_avg, root, out=root)


def _norms(matrix: Tensor, dim: int) -> Tensor:
    norms: Tensor = kernels.row_norms(matrix, dim)
    return norms


def _quotients(norms: Tensor, by: Tensor) -> Tensor:
    """0 where it would be divided by nothing."""
    return torch.where(by > 0, norms / by, 0.0)
