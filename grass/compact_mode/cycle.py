"""Stepping active rows: what an optimizer does around the update of a converted layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grass.compact_mode.layer import LAYERS, CompactLayer
from grass.parallel.ranks import Ranks
from grass.parallel.shards import check_shards
from grass.selection.draws import selection_generator
from grass.selection.exploration import draw_explored
from grass.selection.rules import needs_norms
from grass.state.refresh import Carry, refresh
from grass.state.schema import State, shared_steps


def layers_of(parameters: Iterable[Tensor]) -> list[CompactLayer]:
    """The converted layers whose active rows are among these parameters, found among all layers alive.

    Hold on to the result: the search takes time in proportion to all layers alive, and the layers know their
    parameters also after a wrapper has replaced these.
    """
    alive = {id(layer._parameters.get("active")): layer for layer in LAYERS}
    return [alive[id(p)] for p in parameters if id(p) in alive]


def by_active_rows(layers: Iterable[CompactLayer]) -> dict[int, CompactLayer]:
    """Layers by the ``id`` of their active rows, as of now: wrappers may replace parameters between two steps."""
    rows = ((layer._parameters.get("active"), layer) for layer in layers)  # past __getattr__, which is slow
    return {id(active): layer for active, layer in rows if active is not None}


def adopt(layer: CompactLayer, state: State, carry: Carry) -> State:
    """Begin the state of a layer with the rows that its conversion selected; returns it."""
    if layer.weights and hasattr(layer.active, "to_local"):
        raise ValueError(f"weights={layer.weights!r} cannot be sharded: their scales belong to whole rows")
    check_shards(layer.weight, layer.weight_axis(layer.dim), "weight")
    check_shards(layer.active, layer.dim, "active")
    state.update(step=0, refresh_step=0, refreshes=1, indices=layer.selected.clone(), dim=layer.dim)
    carry(None, layer.projector())
    reserve_rows(state, layer)
    return state


def reserve_rows(state: State, layer: CompactLayer) -> None:
    """Hold a key for the rows themselves where the weight cannot hold their values; a ``state_dict`` puts them there.

    The state has it too because distributed checkpoint takes from a flat ``state_dict`` only the keys that it has.
    """
    state.pop("active", None)
    if layer.active.dtype != layer.weight.dtype:
        state["active"] = torch.empty(0)


def resume(layer: CompactLayer, state: State, values: Tensor | None, group: dict[str, Any], index: int) -> None:
    """Bring a layer to the rows that a loaded state was saved with; ``values`` as in :meth:`CompactLayer.restore`."""
    layer.restore(state["indices"], explored_rows(layer, state, group, index), values)
    reserve_rows(state, layer)
    arm(layer, state, group)


def gathered_norms(layers: list[CompactLayer], ranks: Ranks) -> list[Tensor]:
    """Stop gathering sketches; returns the row norms of each, averaged over the ranks before.

    They are all zero where a sketch overflowed: the rows that did would be the largest, yet count as the smallest.
    """
    sketches = [layer.end_sketch() for layer in layers]
    ranks.mean_(sketches)
    return [torch.linalg.vector_norm(s if s.isfinite().all() else torch.zeros_like(s), dim=1) for s in sketches]


def norms_for(layers: list[CompactLayer], group: dict[str, Any], ranks: Ranks) -> list[Tensor]:
    """Norms for a selection in each layer: from its sketch, or ones for a rule that does not read them."""
    if needs_norms(group["selection"]):
        norms = gathered_norms(layers, ranks)
        for layer, layer_norms in zip(layers, norms, strict=True):
            layer.norms = layer_norms
        return norms
    return [torch.ones(layer.shape[layer.dim]) for layer in layers]


def choose_rows(
    layer: CompactLayer, norms: Tensor, state: State, carry: Carry, group: dict[str, Any], index: int
) -> None:
    """Select the rows that train from the next step on."""
    refresh(state, carry, norms, layer.dim, layer.rank, group, index)
    if "row_scale" in state:
        raise ValueError(f"selection={group['selection']!r} scales or repeats rows: not for compact mode")
    state["indices"] = state["indices"].to(layer.chosen.device)
    layer.select(state["indices"])


def explored_rows(layer: CompactLayer, state: State, group: dict[str, Any], index: int) -> Tensor | None:
    """The rows that a layer explores in the coming step; ``None`` for those that its conversion drew."""
    if not layer.reach or not state["step"]:
        return None
    count = layer.chosen.numel() - layer.rank
    return draw_explored(state["indices"], layer.shape[layer.dim], count, group["seed"], index, state["step"])


def prepare(layer: CompactLayer, state: State, group: dict[str, Any], index: int) -> None:
    """Make a stepped and written-back layer ready for the next forward: other explored rows, a sketch if one is due."""
    explored = explored_rows(layer, state, group, index)
    if explored is not None:
        layer.explore(explored)
    layer.mark_synced()
    arm(layer, state, group)


def arm(layer: CompactLayer, state: State, group: dict[str, Any]) -> None:
    """Gather a sketch in the coming step if it ends in a refresh whose rule reads norms."""
    due = shared_steps(state) + 1 >= group["update_interval"]
    if due and layer.sketch is None and needs_norms(group["selection"]):
        width = layer.shape[1 - layer.dim]
        exact = group["refresh"] == "exact" or group["sketch_size"] >= width
        generator = selection_generator(group["seed"], -width, state["refreshes"])
        layer.begin_sketch(None if exact else rademacher(width, group["sketch_size"], generator).to(layer.rows()))


def rademacher(width: int, size: int, generator: torch.Generator) -> Tensor:
    """A Johnson-Lindenstrauss matrix ``S (width, size)`` of random signs over ``sqrt(size)``: ``E[S S^T] = I``."""
    signs: Tensor = 2 * torch.randint(2, (width, size), generator=generator, dtype=torch.int8) - 1
    return signs / math.sqrt(size)
