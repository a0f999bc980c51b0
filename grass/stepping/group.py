"""What the parameters of one group share in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grass.parallel.background import Background
from grass.parallel.ranks import Ranks
from grass.state.moments import State, shared_steps
from grass.state.precision import rounding_key
from grass.stepping.scratch import ScratchPool


class Member(NamedTuple):
    """A parameter in a step.

    Attributes:
        parameter: as the group holds it.
        grad: its gradient, placed over the ranks as it is.
        state: its state, empty before its first step.
        position: its place among all groups.
    """

    parameter: Tensor
    grad: Tensor
    state: State
    position: int


class Numbers(NamedTuple):
    """What a step multiplies the rows of one weight by, as :func:`grass.kernels.compact_adamw_` takes it.

    Attributes:
        row_steps: Adam steps of the rows, this one included: a number where they share it, else float ``(r,)``.
        step_size: ``lr scale``, eased in after a refresh.
        shrink: ``1 - lr weight_decay``, likewise.
    """

    row_steps: Tensor | int
    step_size: float
    shrink: float


@dataclass
class GroupStep:
    """One step of one parameter group.

    Attributes:
        group: the group.
        scratch: temporary memory.
        background: where exchanges with a bank go on.
        ranks: that train the model together.
        chosen: gets the rows of every weight that has chosen rows in this step.
        lr: the learning rate as a number.
        adam: ``betas``, ``eps`` and ``maximize``.
    """

    group: dict[str, Any]
    scratch: ScratchPool
    background: Background
    ranks: Ranks
    chosen: list[Tensor]
    lr: float = field(init=False)
    adam: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.lr = float(self.group["lr"])
        self.adam = {key: self.group[key] for key in ("betas", "eps", "maximize")}

    def numbers(self, state: State) -> Numbers:
        """The numbers for one weight, whose counts include this step."""
        group, lr, row_steps = self.group, self.lr, state.get("row_steps")
        if group["warmup_after_refresh"] and state["refreshes"] > 1:
            lr *= min(1.0, shared_steps(state) / group["warmup_after_refresh"])
        ages = shared_steps(state) if row_steps is None else row_steps
        return Numbers(ages, lr * group["scale"], 1 - lr * group["weight_decay"])

    def key(self, index: int, state: State) -> int:
        """Of what is rounded stochastically in this step of a parameter."""
        return rounding_key(self.group, index, int(state["step"]))

    def value_key(self, index: int, state: State) -> int | None:
        """Of a weight's rounding; ``None`` rounds it to the nearest."""
        return self.key(index, state) if self.group["stochastic_rounding"] else None


def count(states: list[State]) -> None:
    """Count one step of chosen rows."""
    for state in states:
        state["step"] += 1
    ages = [state["row_steps"] for state in states if "row_steps" in state]
    if ages:
        torch._foreach_add_(ages, 1.0)


def is_half(dtype: torch.dtype) -> bool:
    """Whether values of this type are rounded stochastically if the group says so."""
    return dtype in (torch.bfloat16, torch.float16)
