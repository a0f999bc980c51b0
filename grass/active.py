"""Stepping active rows: what an optimizer does around the update of a converted layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grass.layers import LAYERS, CompactLayer
from grass.moments import State, shared_steps
from grass.ranks import Ranks
from grass.refresh import Carry, refresh
from grass.selection import selection_generator
from grass.shards import check_shards


def layers_by_parameter() -> dict[int, CompactLayer]:
    """Every converted layer alive by the ``id`` of its active rows, as of now: wrappers may swap parameters."""
    return {id(layer._parameters["active"]): layer for layer in LAYERS}  # past __getattr__, which is slow


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


def gathered_norms(layers: list[CompactLayer], ranks: Ranks) -> list[Tensor]:
    """Stop gathering sketches; returns the row norms of each, averaged over the ranks before.

    They are all zero where a sketch overflowed: the rows that did would be the largest, yet count as the smallest.
    """
    sketches = [layer.end_sketch() for layer in layers]
    ranks.mean_(sketches)
    return [torch.linalg.vector_norm(s if s.isfinite().all() else torch.zeros_like(s), dim=1) for s in sketches]


def choose_rows(
    layer: CompactLayer, norms: Tensor, state: State, carry: Carry, group: dict[str, Any], index: int
) -> None:
    """Let the gradient norms of the step just done decide the rows from the next step on."""
    layer.norms = norms
    refresh(state, carry, norms, layer.dim, layer.selected.numel(), group, index)
    if "row_scale" in state:
        raise ValueError(f"selection={group['selection']!r} scales or repeats rows: not for compact mode")
    layer.select(state["indices"])


def arm(layer: CompactLayer, state: State, group: dict[str, Any]) -> None:
    """Have the layer gather a sketch if the coming step is one that ends in a refresh."""
    if layer.sketch is None and shared_steps(state) + 1 >= group["update_interval"]:
        width = layer.shape[1 - layer.dim]
        exact = group["refresh"] == "exact" or group["sketch_size"] >= width
        generator = selection_generator(group["seed"], -width, state["refreshes"])
        layer.begin_sketch(None if exact else rademacher(width, group["sketch_size"], generator).to(layer.rows()))


def rademacher(width: int, size: int, generator: torch.Generator) -> Tensor:
    """A Johnson-Lindenstrauss matrix ``S (width, size)`` of random signs over ``sqrt(size)``: ``E[S S^T] = I``."""
    signs: Tensor = 2 * torch.randint(2, (width, size), generator=generator, dtype=torch.int8) - 1
    return signs / math.sqrt(size)
