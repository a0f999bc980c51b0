"""Rows selected from the full gradient of each weight: dense mode."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from grass.batches import of_one_kind
from grass.options import as_matrix
from grass.parallel.shards import check_shards, is_sharded, local, row_norms
from grass.selection.exploration import auto_scale, draw_explored, reach, turns
from grass.selection.rules import needs_norms
from grass.state.bank_exchange import BankExchange
from grass.state.policies import policy_of
from grass.state.precision import shrink_
from grass.state.refresh import Outcome, have_tokens, is_informative, norms_of_experts, refresh, refresh_due
from grass.state.schema import MOMENTS
from grass.state.strata import STRATUM_KEY, Strata
from grass.stepping.backends import decays_whole, step_rows
from grass.stepping.experts import count_step, place_of, put_moments, state_of, with_tokens
from grass.stepping.group import GroupStep, Member, count
from grass.stepping.rows import DenseExplored, DenseRows


def step_projected(step: GroupStep, members: list[Member], given_norms: dict[Tensor, Tensor]) -> list[Tensor]:
    """Select new rows of each weight if that is due, by given norms or those of its gradient; update them.

    Returns:
        The rows that were selected, of all weights for which that was due.
    """
    exchange = BankExchange.of(step.group, step.ranks)
    stepped, chosen = [], []
    for own in (_stratum(step, member) for member in members):
        if refresh_due(own.member.state, step.options):
            rows = _choose(own, given_norms.pop(own.member.parameter, None), exchange)
            if rows is None:
                continue
            if own.strata is None:
                chosen.append(rows)
        stepped.append(own)
    exchange.finish()
    every = [rows for own in stepped for rows in _rows(own.step, own.member)]
    count([own.member.state for own in stepped if not step.options.is_batch(own.member.parameter)])
    decayed = [each for each in every if decays_whole(step, each)]
    for alike in of_one_kind(decayed, lambda each: step.numbers(each.state).shrink):
        keys = [step.key(each.index, each.state) for each in alike] if step.options.stochastic_rounding else None
        shrink_([each.weight for each in alike], step.numbers(alike[0].state).shrink, keys)
    step_rows(step, every)
    for each in every:
        if each.finish is not None:
            each.finish()
    return chosen


class _Stratum(NamedTuple):
    """What a rank selects rows of: its stratum of a weight, with its share of ``rank``; by default all of the weight.

    Attributes:
        step: with its options.
        member: with its part of parameter and gradient.
        strata: how the ranks divide the weight; ``None``: not along the selected dimension.
    """

    step: GroupStep
    member: Member
    strata: Strata | None


def _stratum(step: GroupStep, member: Member) -> _Stratum:
    p, grad, state, position = member
    strata = Strata.of(p, step.options.dim_of(p)) if is_sharded(p) else None
    if strata is None:
        return _Stratum(step, member, None)
    own = Member(strata.part(p.detach()), strata.part(grad), state, position + strata.number * STRATUM_KEY)
    return _Stratum(step.of_strata(strata.count), own, strata)


def _choose(stratum: _Stratum, norms: Tensor | None, exchange: BankExchange) -> Tensor | None:
    """Select rows, and return them; ``None`` if they are not to be updated.

    The first step is not an update if both gradient and learning rate are zero:
    ``torch.distributed.checkpoint`` takes such a step to make a fresh optimizer create its state.
    """
    step, (p, grad, state, index), strata = stratum
    batch, dim, experts = step.options.is_batch(p), step.options.dim_of(p), step.options.experts_of(p)
    check_shards(p if batch else as_matrix(p.detach()), dim + batch, "A weight", batch=batch)
    weight = step.options.matrix_of(local(p.detach()), dim)
    rank = experts * step.options.selected(weight.shape[dim] // experts)
    if norms is None:
        norms = _norms(step, grad, dim)
    carry = policy_of(state, weight, step.options, index, exchange, by_row=batch)
    informative = None
    if strata is not None and _reads_norms(step):
        # all ranks must count the same refreshes, or one of them would wait for the others in the next step
        informative = strata.any(is_informative(norms), norms.device)
    outcome = refresh(state, carry, norms, dim, rank, step.options, index, experts, informative=informative)
    if outcome is Outcome.PROVISIONAL and not step.lr:
        return None
    indices: Tensor = state["indices"]
    return indices


def _reads_norms(step: GroupStep) -> bool:
    """Whether norms decide, also of any rule if ``lr`` is 0: zeros may then mean no update."""
    return needs_norms(step.options.selection) or not step.lr


def _norms(step: GroupStep, grad: Tensor, dim: int) -> Tensor:
    """Row norms; ones for a rule that does not read them."""
    if _reads_norms(step):
        return row_norms(grad if step.options.is_batch(grad) else as_matrix(grad), dim)
    size = step.options.matrix_of(grad).shape[dim]
    if step.options.is_batch(grad):
        return norms_of_experts(have_tokens(local(grad), grad), size)
    return torch.ones(size, dtype=torch.float32, device=grad.device)


def _rows(step: GroupStep, member: Member) -> list[DenseRows]:
    """The rows that move in this step; call it before the step is counted."""
    p, grad, state, position = member
    experts = step.options.experts_of(p)
    explored = _explored(step, member, experts)
    if step.options.is_batch(p):
        seen = with_tokens(local(grad), grad)
        count_step(state, seen, experts)
        return [_rows_of_expert(member, expert, experts, explored) for expert in seen]
    weight, whole_grad = local(as_matrix(p.detach())), local(as_matrix(grad))
    selection = state["indices"], state.get("row_scale"), state["dim"]
    finish = partial(_copy_back, local(p.detach()), weight) if p.ndim > 2 else None
    return [DenseRows(weight, *selection, whole_grad, state, position, explored, finish)]


def _rows_of_expert(member: Member, expert: int, experts: int, explored: DenseExplored | None) -> DenseRows:
    p, grad, state, position = member
    dim = state["dim"]
    own = state_of(state, expert, experts, dim)
    own |= {key: own[key].contiguous() for key in MOMENTS}  # copies with dim=1: kernels want no gaps
    weight, first = local(p.detach())[expert], expert * p.shape[1 + dim]
    if explored is not None:
        drawn = explored.indices
        indices = None if drawn is None else drawn.view(experts, -1)[expert] - first
        explored = replace(explored, grad=grad[expert], indices=indices)
    place = place_of(position, expert)
    finish = partial(put_moments, state, own, expert, experts, dim)
    return DenseRows(weight, own["indices"] - first, None, dim, local(grad)[expert], own, place, explored, finish)


def _explored(step: GroupStep, member: Member, experts: int) -> DenseExplored | None:
    """The rows that a weight explores in this step."""
    state, options = member.state, step.options
    size, rank = options.matrix_of(member.parameter).shape[state["dim"]], len(state["indices"])
    count = experts * options.explored(rank // experts, size // experts)
    if not count:
        return None
    drawn = None
    if count < size - rank:
        key = options.seed, member.position, state["step"]
        drawn = draw_explored(state["indices"], size, count, *key, experts)
    sizes = size, rank, count
    return DenseExplored(member.grad, reach(*sizes), turns(*sizes), auto_scale(*sizes), drawn)


def _copy_back(part: Tensor, matrix: Tensor) -> None:
    if matrix.data_ptr() != part.data_ptr():  # a copy: channels_last
        part.copy_(matrix.view(part.shape))
