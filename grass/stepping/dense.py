"""Weights of which a step chooses, keeps and updates rows of the full gradient: dense mode."""

from __future__ import annotations

import torch
from torch import Tensor

from grass.options import as_matrix, explored_count, resolve_dim, resolve_rank
from grass.parallel.shards import check_shards, local, row_norms
from grass.selection.exploration import draw_explored, reach
from grass.selection.rules import needs_norms
from grass.state.bank_exchange import BankExchange
from grass.state.precision import shrink_
from grass.state.refresh import carry_moments, refresh, refresh_due
from grass.stepping.backends import step_rows
from grass.stepping.group import GroupStep, Member, count
from grass.stepping.rows import Explored, Rows


def step_projected(step: GroupStep, members: list[Member], given_norms: dict[Tensor, Tensor]) -> None:
    """Choose new rows of each weight if that is due, by the given norms or those of its gradient; update them."""
    exchange = BankExchange.of(step.group, step.ranks)
    stepped = [
        m
        for m in members
        if not refresh_due(m.state, step.group) or _choose(step, m, given_norms.pop(m.parameter, None), exchange)
    ]
    exchange.finish()
    every = [_rows(step, member) for member in stepped]
    count([member.state for member in stepped])
    if step.group["decay"] == "all":
        for rows in every:
            shrink_(rows.stepped(), step.numbers(rows.state).shrink, step.value_key(rows.index, rows.state))
    step_rows(step, every)
    for member, rows in zip(stepped, every, strict=True):
        if member.parameter.ndim > 2:
            _copy_back(local(member.parameter.detach()), rows.stepped())


def _choose(step: GroupStep, member: Member, norms: Tensor | None, exchange: BankExchange) -> bool:
    """Choose rows. Returns whether the step goes on."""
    p, grad, state, index = member
    group = step.group
    weight = as_matrix(p.detach())
    dim = resolve_dim(group["dim"], weight)
    rank = resolve_rank(group["rank"], weight.shape[dim])
    check_shards(weight, dim, "A weight")
    if norms is None:
        norms = _norms(step, as_matrix(grad), dim)
    carry = carry_moments(state, local(weight), group, index, exchange)
    goes_on = refresh(state, carry, norms, dim, rank, group, index)
    if goes_on:
        step.chosen.append(state["indices"])
    return goes_on


def _norms(step: GroupStep, grad: Tensor, dim: int) -> Tensor:
    """Row norms; ones for a rule that does not read them, unless zeros may mean that state is only being made."""
    if needs_norms(step.group["selection"]) or not step.lr:
        return row_norms(grad, dim)
    return torch.ones(grad.shape[dim])


def _rows(step: GroupStep, member: Member) -> Rows:
    """The rows that move in a step; call it before the step is counted."""
    p, grad, state, position = member
    weight, whole_grad = local(as_matrix(p.detach())), local(as_matrix(grad))
    selection = state["indices"], state.get("row_scale"), state["dim"]
    return Rows(weight, *selection, whole_grad, None, state, position, _explored(step, member))


def _explored(step: GroupStep, member: Member) -> Explored | None:
    """What a weight explores in the coming step."""
    state, group = member.state, step.group
    size, rank = as_matrix(member.parameter).shape[state["dim"]], len(state["indices"])
    count = explored_count(group, rank, size)
    if not count:
        return None
    drawn = None
    if count < size - rank:
        drawn = draw_explored(state["indices"], size, count, group["seed"], member.position, state["step"])
    return Explored(member.grad, reach(size, rank, count), drawn)


def _copy_back(part: Tensor, matrix: Tensor) -> None:
    if matrix.data_ptr() != part.data_ptr():  # a copy: channels_last
        part.copy_(matrix.view(part.shape))
