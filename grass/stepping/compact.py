"""Rows that are parameters themselves: compact mode."""

from __future__ import annotations

from grass.compact_mode.cycle import adopt, choose_rows, norms_for, prepare
from grass.compact_mode.layer import CompactLayer
from grass.parallel.shards import local
from grass.state.bank_exchange import BankExchange
from grass.state.policies import Policy, policy_of
from grass.state.precision import shrink_
from grass.state.refresh import refresh_due
from grass.stepping.backends import step_rows
from grass.stepping.group import GroupStep, Member, count
from grass.stepping.rows import Explored, Rows

Active = tuple[Member, CompactLayer]
"""Active rows in a step, with their converted layer."""


def step_active(step: GroupStep, every: list[Active]) -> None:
    """Update active rows, write them back, and select new ones if that is due."""
    begun = _begin(step, every)
    count([member.state for member, _ in begun])
    if step.options.decay == "all":
        for member, layer in begun:
            shrink, key = step.numbers(member.state).shrink, step.value_key(member.position, member.state)
            layer.decay_(shrink, key)
            shrink_(layer.explored_part(layer.rows()), shrink, key)
    step_rows(step, [_rows(member, layer) for member, layer in begun])
    for member, layer in begun:
        if layer.scale() is not None:
            layer.write_back(step.key(member.position, member.state))
    _refresh(step, [item for item in begun if refresh_due(item[0].state, step.options)])
    for member, layer in begun:
        prepare(layer, member.state, step.group, member.position)


def _begin(step: GroupStep, every: list[Active]) -> list[Active]:
    """Create state on the first step; skip the update if this is the checkpointer's state-building step."""
    fresh = [item for item in every if not item[0].state]
    exchange = BankExchange.of(step.group, step.ranks)
    for member, layer in fresh:
        adopt(layer, member.state, _policy(step, member, layer, exchange))
    if fresh and not step.lr:
        moves = any(bool(member.grad.any()) for member, _ in fresh)
        if not step.ranks.any(moves, local(fresh[0][0].grad).device):
            return [item for item in every if item[0].state["step"] > 0]
    return every


def _policy(step: GroupStep, member: Member, layer: CompactLayer, exchange: BankExchange) -> Policy:
    return policy_of(member.state, layer.matrix(), step.options, member.position, exchange)


def _rows(member: Member, layer: CompactLayer) -> Rows:
    p, grad, state, index = member
    weight = layer.matrix() if layer.scale() is None else None  # codes: the layer writes the rows back itself
    own, values = local(grad), local(p.detach())
    explored = None
    if layer.reach:
        explored = Explored(layer.explored_part(grad), layer.reach, layer.explored, layer.explored_part(values))
    selected = layer.selected_part(own), layer.selected_part(values)
    return Rows(weight, layer.selected, None, layer.dim, *selected, state, index, explored)


def _refresh(step: GroupStep, due: list[Active]) -> None:
    """Select new rows, by norms summed over the ranks if the rule reads them."""
    norms = norms_for([layer for _, layer in due], step.group, step.ranks)
    exchange = BankExchange.of(step.group, step.ranks, step.background)
    for (member, layer), layer_norms in zip(due, norms, strict=True):
        carry = _policy(step, member, layer, exchange)
        choose_rows(layer, layer_norms, member.state, carry, step.group, member.position)
        step.chosen.append(member.state["indices"])
    exchange.finish()
