"""Rows that are parameters themselves: compact mode."""

from __future__ import annotations

from torch import Tensor

from grass.compact_mode.active_rows import ExploredViews
from grass.compact_mode.experts import ExpertRows
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.refresh_cycle import Trained, adopt, advance
from grass.parallel.shards import local
from grass.selection.exploration import auto_scale
from grass.state.bank_exchange import BankExchange
from grass.state.policies import Policy, policy_of
from grass.state.refresh import of_each
from grass.stepping.backends import step_rows
from grass.stepping.experts import count_step, place_of, state_of, with_tokens
from grass.stepping.group import GroupStep, Member, count
from grass.stepping.rows import CompactExplored, CompactRows

Active = tuple[Member, CompactLayer]
"""Active rows in a step, with their converted layer."""


def step_active(step: GroupStep, every: list[Active]) -> list[Tensor]:
    """Update active rows, write them back, and select new ones if that is due. Returns these."""
    begun = [(_of_stratum(member, layer), layer) for member, layer in every]
    if fresh := [item for item in begun if not item[0].state]:
        begun = _begin(step, begun, fresh)
    count([member.state for member, layer in begun if not layer.is_batch])
    every_rows, views = list[CompactRows](), list[ExploredViews | None]()
    for member, layer in begun:
        rows = _rows(member, layer)
        every_rows += _of_experts(rows, layer, member.grad) if isinstance(layer, ExpertRows) else [rows]
        moving, weight = rows.explored, rows.weight
        if moving is None or weight is None:
            views.append(None)
        else:
            views.append(ExploredViews(moving.values, weight, moving.indices))
    if step.options.decay == "all":
        for member, layer in begun:
            shrink, key = step.numbers(member.state).shrink, step.value_key(member.position, member.state)
            layer.decay_(shrink, key)
    step_rows(step, every_rows)
    for member, layer in begun:
        if layer.scale() is not None:
            layer.write_back(step.key(member.position, member.state))
    exchange = BankExchange.of(step.group, step.ranks, step.background)
    trained = [Trained(layer, m.state, m.position, m.grad, v) for (m, layer), v in zip(begun, views, strict=True)]
    chosen = advance(trained, step.options, step.ranks, lambda item: _policy(step, item, exchange))
    exchange.finish()
    return chosen


def _of_stratum(member: Member, layer: CompactLayer) -> Member:
    """The part of a parameter that this rank selects rows of."""
    p, grad, state, position = member
    if type(grad) is not Tensor:
        p, grad = layer.of_stratum(p), layer.of_stratum(grad)
    return Member(p, grad, state, layer.place(position))


def _begin(step: GroupStep, every: list[Active], fresh: list[Active]) -> list[Active]:
    """Create state of those without; skip their update if this is the checkpointer's state-building step."""
    exchange = BankExchange.of(step.group, step.ranks)
    for member, layer in fresh:
        adopt(layer, member.state, _policy(step, Trained(layer, member.state, member.position), exchange))
    if not step.lr:
        moves = any(bool(member.grad.any()) for member, _ in fresh)
        if not step.ranks.any(moves, local(fresh[0][0].grad).device):
            return [item for item in every if item[0].state["step"] > 0]
    return every


def _rows(member: Member, layer: CompactLayer) -> CompactRows:
    p, grad, state, index = member
    weight = layer.matrix() if _writes(layer) and not layer.is_batch else None
    own, values, chosen, dim = local(grad), local(p.detach()), layer.chosen, layer.dim
    if not layer.reach:
        return CompactRows(weight, chosen, dim, own, values, state, index, None)
    counts = [layer.rank, chosen.shape[0] - layer.rank]
    grads, stepped = own.split_with_sizes(counts, dim), values.split_with_sizes(counts, dim)
    indices, others = chosen.split_with_sizes(counts)
    of_others = grads[1] if own is grad else layer.explored_part(grad)  # sharded: lengths are summed over the ranks
    factors = layer.reach, layer.gradient_scale**2, auto_scale(layer.shape[dim], *counts)
    explored = CompactExplored(of_others, *factors, others, stepped[1])
    return CompactRows(weight, indices, dim, grads[0], stepped[0], state, index, explored)


def _writes(layer: CompactLayer) -> bool:
    """Whether the step writes the rows into the weight: an int8 layer does so itself."""
    return layer.scale() is None and not layer.synced.late


def _of_experts(rows: CompactRows, layer: ExpertRows, grad: Tensor) -> list[CompactRows]:
    """The rows of each expert that tokens were sent to; call it before the step is counted."""
    seen = with_tokens(of_each(rows.grad, rows.dim, layer.experts), grad)
    count_step(rows.state, seen, layer.experts)
    return [_of_expert(rows, layer, expert) for expert in seen]


def _of_expert(rows: CompactRows, layer: ExpertRows, expert: int) -> CompactRows:
    experts = layer.experts
    first = expert * (layer.shape[layer.dim] // experts)

    def part(tensor: Tensor, dim: int) -> Tensor:
        size = tensor.shape[dim] // experts
        return tensor.narrow(dim, expert * size, size)

    dim, explored = rows.dim, rows.explored
    if explored is not None:
        grad, indices, values = part(explored.grad, dim), part(explored.indices, 0) - first, part(explored.values, dim)
        explored = CompactExplored(grad, explored.reach, explored.turns, explored.auto_scale, indices, values)
    state, place = state_of(rows.state, expert, experts, dim), place_of(rows.index, expert)
    weight = layer.matrix_of(expert) if _writes(layer) else None
    own = part(rows.indices, 0) - first, dim, part(rows.grad, dim), part(rows.values, dim)
    return CompactRows(weight, *own, state, place, explored)


def _policy(step: GroupStep, item: Trained, exchange: BankExchange) -> Policy:
    layer, shape = item.layer, list(item.layer.rows().shape)
    shape[layer.dim] = layer.shape[layer.dim]
    like = layer.stored().new_empty(1).expand(shape)  # moments are row-major, whatever the weight is
    return policy_of(item.state, like, step.options, item.position, exchange, by_row=layer.is_batch)
