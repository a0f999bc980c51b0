r"""Moves explored rows by :mod:`grass.kernels`; formulas in :mod:`grass.selection.exploration`.

:class:`grass.cpu.kernel.Batch` does it for float32 weights on the CPU, in the call that steps the selected rows.

Floor if all rows move, ``dim=1``, float32: ``G`` read twice, ``W`` and both moments read and written, ``16mn + 16mr``
bytes, where AdamW moves ``28mn`` (``dim=0`` reads ``G`` once). In compact mode, for ``q`` explored rows of ``n``
values: gradient and values read, values and weight written, ``16qn`` bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grass.batches import of_one_kind
from grass.kernels import move_factors, move_rows_, row_norms
from grass.parallel.shards import summed
from grass.selection.projector import Projector
from grass.stepping.group import GroupStep
from grass.stepping.rows import Numbered, Place, Rows, ages_of, shared_by_kernels


def step_explored(step: GroupStep, every: list[Numbered]) -> None:
    """Decay and move the explored rows of weights; call it after the selected ones have been stepped."""
    for alike in of_one_kind(every, _kind):
        _step_alike(step, alike)


def _kind(item: Numbered) -> object:
    rows, _ = item
    assert rows.explored is not None
    return shared_by_kernels(item), rows.explored.reach, type(rows.explored.grad) is Tensor, rows.rounds_always


def _step_alike(step: GroupStep, alike: list[Numbered]) -> None:
    (first, numbers), every = alike[0], [rows for rows, _ in alike]
    assert first.explored is not None
    factors, lengths, means = zip(*_factors(step, alike), strict=True)
    places, grads = [rows.explored_place() for rows in every], [rows.explored_grad() for rows in every]
    norms = None
    if type(first.explored.grad) is not Tensor:
        parts = zip(every, places, grads, factors, lengths, strict=True)
        norms, means = zip(*(_lengths_of_all_ranks(*part) for part in parts), strict=True)
    size = numbers.step_size * first.explored.reach
    rounds = first.rounds_always or step.options.stochastic_rounding
    move_rows_(
        [place.weight for place in places],
        [place.indices for place in places],
        grads,
        factors,
        means,
        step_size=-size if step.options.maximize else size,
        shrink=numbers.explored_shrink,
        dim=first.dim,
        rows=None if places[0].rows is None else [place.rows for place in places],
        norms=norms,
        gather_grad=first.in_weight,
        keys=[step.key(rows.index, rows.state) for rows in every] if rounds else None,
    )


def _lengths_of_all_ranks(
    rows: Rows, place: Place, grad: Tensor, factors: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """``|U_k|`` and the mean of ``|D_k|`` of rows whose width the ranks divide: squares are summed over them."""
    assert rows.explored is not None
    own = Projector(place.indices, None, rows.dim).gather(grad) if rows.in_weight else grad
    norms = row_norms(own * factors.unsqueeze(rows.dim), rows.dim)
    squares = summed(torch.cat([norms, lengths]).square(), rows.explored.grad)
    norms, lengths = torch.split(squares.sqrt(), [norms.numel(), lengths.numel()])
    return norms, lengths.mean()


def _factors(step: GroupStep, alike: list[Numbered]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """``phi``, ``|D_k|`` and their mean, from moments that this step has updated."""
    (first, _), every, options = alike[0], [rows for rows, _ in alike], step.options
    moments = ([rows.state[name] for rows in every] for name in ("exp_avg", "exp_avg_sq"))
    scales = None
    if "exp_avg_scale" in first.state:
        scales = tuple([rows.state[name] for rows in every] for name in ("exp_avg_scale", "exp_avg_sq_scale"))
    indices = [rows.indices for rows in every] if first.in_weight else None
    grads, numbers = [rows.grad for rows in every], {"dim": first.dim, "betas": options.betas, "eps": options.eps}
    moves: list[tuple[Tensor, Tensor, Tensor]] = move_factors(
        *moments, grads, ages_of(alike), scales=scales, indices=indices, **numbers
    )
    return moves
