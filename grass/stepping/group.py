"""What the parameters of one group share in a step."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grass.kernels.layout import is_dense
from grass.options import Options
from grass.parallel.background import Background
from grass.parallel.ranks import Ranks
from grass.state.precision import rounding_key
from grass.state.schema import State, shared_steps


class Member(NamedTuple):
    """A parameter in a step.

    Attributes:
        parameter: as the group holds it.
        grad: its gradient, sharded as the parameter is.
        state: its state, empty before its first step.
        position: its place among all groups.
    """

    parameter: Tensor
    grad: Tensor
    state: State
    position: int


class Numbers(NamedTuple):
    """The numbers of a step of one weight, as :func:`grass.kernels.compact_adamw_` takes them.

    Attributes:
        row_steps: Adam steps of the rows, this one included: a number if they share it, else float ``(r,)``.
        step_size: ``lr scale``; ``lr`` with the warm-up after a refresh.
        shrink: ``1 - lr weight_decay``, with the same ``lr``.
        explored_shrink: what explored rows are multiplied by.
    """

    row_steps: Tensor | int
    step_size: float
    shrink: float
    explored_shrink: float = 1.0


class ScratchPool:
    """Hands the same memory to one list of weights after another.

    Without it the temporaries of a step cost more on a CPU than its arithmetic: fresh memory faults in page by page.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def like(self, slot: int, compacts: list[Tensor]) -> list[Tensor]:
        """Uninitialised tensors of the shapes, dtype and device of ``compacts``, which share one dtype.

        They have the strides of :func:`is_dense` tensors and are row-major otherwise. The next call with the same
        ``slot`` reuses their memory.
        """
        key, size = (slot, compacts[0].dtype, compacts[0].device), sum(t.numel() for t in compacts)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=key[1], device=key[2])
        views, offset = [], 0
        for t in compacts:
            stride = t.stride() if is_dense(t) else torch.empty(t.shape, device="meta").stride()
            views.append(self._buffers[key].as_strided(t.shape, stride, offset))
            offset += t.numel()
        return views


@dataclass
class GroupStep:
    """One step of one parameter group.

    Attributes:
        group: the group, as torch holds it.
        options: its hyperparameters.
        scratch: temporary memory.
        background: runs exchanges with a bank.
        ranks: the ranks that train the model together.
        lr: the learning rate as a number.
        adam: ``betas``, ``eps`` and ``maximize``.
    """

    group: dict[str, Any]
    options: Options
    scratch: ScratchPool
    background: Background
    ranks: Ranks
    lr: float = field(init=False)
    adam: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        self.lr = float(options.lr)
        self.adam = {"betas": options.betas, "eps": options.eps, "maximize": options.maximize}

    def of_strata(self, count: int) -> GroupStep:
        """The step of each of ``count`` strata of a weight."""
        step = copy.copy(self)
        step.options = self.options.of_strata(count)
        return step

    def numbers(self, state: State, auto_scale: float = 1.0) -> Numbers:
        """The numbers for one weight, whose counts include this step; ``auto_scale`` is its ``scale="auto"``."""
        options, lr, row_steps = self.options, self.lr, state.get("row_steps")
        if options.warmup_after_refresh and state["refreshes"] > 1:
            lr *= min(1.0, shared_steps(state) / options.warmup_after_refresh)
        ages = shared_steps(state) if row_steps is None else row_steps
        scale = auto_scale if isinstance(options.scale, str) else options.scale
        return Numbers(ages, lr * scale, 1 - lr * options.weight_decay)

    def key(self, index: int, state: State) -> int:
        """RNG key for stochastic rounding of a parameter at this step."""
        return rounding_key(self.options, index, int(state["step"]))

    def value_key(self, index: int, state: State) -> int | None:
        """RNG key for rounding a weight's values; ``None`` rounds to nearest."""
        return self.key(index, state) if self.options.stochastic_rounding else None


def count(states: list[State]) -> None:
    """Count one step in the states of selected rows."""
    for state in states:
        state["step"] += 1
    ages = [state["row_steps"] for state in states if "row_steps" in state]
    if ages:
        torch._foreach_add_(ages, 1.0)
