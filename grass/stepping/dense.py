"""Rows selected from the full gradient of each weight: dense mode."""

from __future__ import annotations

import torch
from torch import Tensor

from grass.options import as_matrix, resolve_dim
from grass.parallel.shards import check_shards, local, row_norms
from grass.selection.exploration import draw_explored, reach
from grass.selection.rules import needs_norms
from grass.state.bank_exchange import BankExchange
from grass.state.policies import policy_of
from grass.state.precision import shrink_
from grass.state.refresh import Outcome, refresh, refresh_due
from grass.stepping.backends import step_rows
from grass.stepping.group import GroupStep, Member, count
from grass.stepping.rows import DenseExplored, DenseRows


def step_projected(step: GroupStep, members: list[Member], given_norms: dict[Tensor, Tensor]) -> None:
    """Select new rows of each weight if that is due, by given norms or those of its gradient; update them."""
    exchange = BankExchange.of(step.group, step.ranks)
    stepped = [
        m
        for m in members
        if not refresh_due(m.state, step.options) or _choose(step, m, given_norms.pop(m.parameter, None), exchange)
    ]
    exchange.finish()
    every = [_rows(step, member) for member in stepped]
    count([member.state for member in stepped])
    if step.options.decay == "all":
        for rows in every:
            shrink_(rows.stepped(), step.numbers(rows.state).shrink, step.value_key(rows.index, rows.state))
    step_rows(step, every)
    for member, rows in zip(stepped, every, strict=True):
        if member.parameter.ndim > 2:
            _copy_back(local(member.parameter.detach()), rows.stepped())


def _choose(step: GroupStep, member: Member, norms: Tensor | None, exchange: BankExchange) -> bool:
    """Select rows. Returns whether to update them.

    The first step is not an update if both gradient and learning rate are zero:
    ``torch.distributed.checkpoint`` takes such a step to make a fresh optimizer create its state.
    """
    p, grad, state, index = member
    weight = as_matrix(p.detach())
    dim = resolve_dim(step.options.dim, weight)
    rank = step.options.selected(weight.shape[dim])
    check_shards(weight, dim, "A weight")
    if norms is None:
        norms = _norms(step, as_matrix(grad), dim)
    carry = policy_of(state, local(weight), step.options, index, exchange)
    if refresh(state, carry, norms, dim, rank, step.options, index) is Outcome.PROVISIONAL and not step.lr:
        return False
    step.chosen.append(state["indices"])
    return True


def _norms(step: GroupStep, grad: Tensor, dim: int) -> Tensor:
    """Row norms. A rule that does not read them gets ones, unless ``lr`` is 0: zeros may then mean no update."""
    if needs_norms(step.options.selection) or not step.lr:
        return row_norms(grad, dim)
    return torch.ones(grad.shape[dim])


def _rows(step: GroupStep, member: Member) -> DenseRows:
    """The rows that move in this step; call it before the step is counted."""
    p, grad, state, position = member
    weight, whole_grad = local(as_matrix(p.detach())), local(as_matrix(grad))
    selection = state["indices"], state.get("row_scale"), state["dim"]
    return DenseRows(weight, *selection, whole_grad, state, position, _explored(step, member))


def _explored(step: GroupStep, member: Member) -> DenseExplored | None:
    """The rows that a weight explores in this step."""
    state, options = member.state, step.options
    size, rank = as_matrix(member.parameter).shape[state["dim"]], len(state["indices"])
    count = options.explored(rank, size)
    if not count:
        return None
    drawn = None
    if count < size - rank:
        drawn = draw_explored(state["indices"], size, count, options.seed, member.position, state["step"])
    return DenseExplored(member.grad, reach(size, rank, count), drawn)


def _copy_back(part: Tensor, matrix: Tensor) -> None:
    if matrix.data_ptr() != part.data_ptr():  # a copy: channels_last
        part.copy_(matrix.view(part.shape))
