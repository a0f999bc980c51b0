"""One step of an optimizer over all its groups, taken at once or parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.parallel.background import Background
from grass.parallel.ranks import Ranks
from grass.parallel.shards import aligned_grad
from grass.state.moments import State
from grass.stepping import GroupStep, Member, step_group
from grass.stepping.scratch import ScratchPool


@dataclass
class WholeStep:
    """A step between its first and its last parameter. Both ways to step share it, so their results are equal.

    Attributes:
        states: the optimizer's state.
        layers: converted layers by the ``id`` of their active rows.
        ranks: that train the model together.
        background: where exchanges with a bank go on.
        given_norms: row norms that replace those of the gradient in a refresh.
        scratch: temporary memory.
        chosen: the rows of every weight that has chosen rows in this step.
        stepped: the ``id`` of every parameter that has been stepped.
    """

    states: dict[Tensor, State]
    layers: dict[int, CompactLayer]
    ranks: Ranks
    background: Background
    given_norms: dict[Tensor, Tensor]
    scratch: ScratchPool = field(default_factory=ScratchPool)
    chosen: list[Tensor] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)

    def advance(self, group: dict[str, Any], parameters: Iterable[tuple[int, Tensor]]) -> None:
        """Step those of a group's ``(position, parameter)`` that have a gradient."""
        members = [Member(p, aligned_grad(p), self.states[p], i) for i, p in parameters if p.grad is not None]
        step = GroupStep(group, self.scratch, self.background, self.ranks, self.chosen)
        step_group(step, members, self.layers, self.given_norms)
        self.stepped.update(id(member.parameter) for member in members)
