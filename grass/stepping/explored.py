r"""Moves explored rows by :mod:`grass.kernels`; formulas in :mod:`grass.selection.exploration`.

:class:`grass.cpu.kernel.Batch` does it for float32 weights on the CPU, in the call that steps the selected rows.

Floor if all rows move, ``dim=1``, float32: ``G`` read twice, ``W`` and both moments read and written, ``16mn + 16mr``
bytes, where AdamW moves ``28mn`` (``dim=0`` reads ``G`` once). In compact mode, for ``q`` explored rows of ``n``
values: gradient and values read, values and weight written, ``16qn`` bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grass.kernels import move_factors, move_rows_, row_norms
from grass.parallel.shards import summed
from grass.selection.projector import Projector
from grass.state.precision import shrink_
from grass.stepping.group import GroupStep, Numbers
from grass.stepping.rows import Rows


def decay_explored(step: GroupStep, rows: Rows, numbers: Numbers) -> None:
    """Decay the explored rows of a weight before they move."""
    explored, factor = rows.explored, numbers.explored_shrink
    if explored is None or factor == 1.0:
        return
    key = step.value_key(rows.index, rows.state)
    if explored.values is not None:
        shrink_(explored.values, factor, key)
        return
    place = rows.explored_place()
    projector = Projector(place.indices, None, rows.dim)
    values = projector.gather(place.weight)
    shrink_(values, factor, key)
    projector.scatter_(place.weight, values)


def step_explored(step: GroupStep, rows: Rows, numbers: Numbers) -> None:
    """Move the explored rows of a weight; call it after the selected ones have been stepped."""
    explored, dim = rows.explored, rows.dim
    assert explored is not None
    factors, lengths = _factors(step, rows, numbers.row_steps)
    place, grad = rows.explored_place(), rows.explored_grad()
    norms = None
    if type(explored.grad) is not Tensor:  # sharded along the width: lengths are summed over the ranks
        own = Projector(place.indices, None, dim).gather(grad) if rows.in_weight else grad
        norms = row_norms(own * factors.unsqueeze(dim), dim)
        squares = summed(torch.cat([norms, lengths]).square(), explored.grad)
        norms, lengths = torch.split(squares.sqrt(), [norms.numel(), lengths.numel()])
    size = numbers.step_size * explored.reach
    move_rows_(
        place.weight,
        place.indices,
        grad,
        factors,
        lengths.mean(),
        step_size=-size if step.options.maximize else size,
        dim=dim,
        rows=place.rows,
        norms=norms,
        gather_grad=rows.in_weight,
        key=(step.key if rows.rounds_always else step.value_key)(rows.index, rows.state),
    )


def _factors(step: GroupStep, rows: Rows, row_steps: Tensor | int) -> tuple[Tensor, Tensor]:
    """``phi`` and ``|D_k|``, from moments that this step has updated."""
    state, options = rows.state, step.options
    moments = state["exp_avg"], state["exp_avg_sq"]
    scales = (state["exp_avg_scale"], state["exp_avg_sq_scale"]) if "exp_avg_scale" in state else None
    indices = rows.indices if rows.in_weight else None
    numbers = {"dim": rows.dim, "betas": options.betas, "eps": options.eps}
    factors, lengths = move_factors(*moments, rows.grad, row_steps, scales=scales, indices=indices, **numbers)
    return factors, lengths
