"""A step is done in parts: what the host steps, and what the device does, each in a thread of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.options import Options
from grass.parallel.background import Background
from grass.parallel.ranks import Ranks
from grass.state.refresh import refresh_due
from grass.state.schema import State, shared_steps
from grass.stepping.whole import WholeStep

Place = tuple[Tensor, dict[str, Any], int]
"""A parameter that has a gradient, its group, and its place among all parameters."""


def beside(whole: WholeStep, ranks: Ranks) -> WholeStep:
    """A step of some of the parameters, in a thread of its own."""
    return WholeStep({}, {}, ranks, Background(), {})


def fixed_options(group: dict[str, Any]) -> Options:
    """A group's options as they are now: a scheduler may change the learning rate before the host reads it."""
    options = Options.of(group)
    return replace(options, lr=float(options.lr))


def is_due(state: State, options: Options) -> bool:
    """Whether dense mode selects rows in the coming step."""
    return not state or ("indices" in state and refresh_due(state, options))


def may_choose(state: State, options: Options) -> bool:
    """Whether the coming step may select rows, for which ranks communicate; compact mode does so after its update."""
    return is_due(state, options) or ("indices" in state and shared_steps(state) + 1 >= options.update_interval)


def stand_in(stepped: Tensor, layer: CompactLayer | None, member: Place, whole: WholeStep, part: WholeStep) -> None:
    """Let a tensor be stepped in place of a parameter, with its layer and its given norms."""
    p, group, _ = member
    whole.stepped.add(id(p))
    if layer is not None:
        part.layers[id(stepped)] = layer
    if p in whole.given_norms and is_due(whole.states[p], part.options[id(group)]):
        part.given_norms[stepped] = whole.given_norms.pop(p).to(stepped.device)
