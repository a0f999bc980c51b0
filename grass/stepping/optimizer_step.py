"""One step of an optimizer over all its groups: all parameters at once, or one by one in backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.cpu import masters
from grass.options import Options
from grass.parallel.background import Background
from grass.parallel.ranks import Ranks
from grass.parallel.shards import aligned_grad, local
from grass.state.schema import State
from grass.stepping import GroupStep, Member, step_group
from grass.stepping.group import ScratchPool
from grass.stepping.plain import begin_plain


@dataclass
class OptimizerStep:
    """A step from its first to its last parameter. Both ways to step use it, so their results are equal.

    Attributes:
        states: the optimizer's state.
        layers: converted layers by the ``id`` of their active rows.
        ranks: the ranks that train the model together.
        background: runs exchanges with a bank.
        given_norms: row norms that replace those of the gradient in a refresh.
        scratch: temporary memory.
        chosen: the rows of every weight that has selected rows in this step.
        stepped: the ``id`` of every parameter that has been stepped.
        options: the hyperparameters of each group by its ``id``.
    """

    states: dict[Tensor, State]
    layers: dict[int, CompactLayer]
    ranks: Ranks
    background: Background
    given_norms: dict[Tensor, Tensor]
    scratch: ScratchPool = field(default_factory=ScratchPool)
    chosen: list[Tensor] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    options: dict[int, Options] = field(default_factory=dict)

    def part(self, ranks: Ranks) -> OptimizerStep:
        """An empty step for some of the parameters, in a thread of its own."""
        return OptimizerStep({}, {}, ranks, Background(), {})

    def advance(self, group: dict[str, Any], parameters: Iterable[tuple[int, Tensor]]) -> None:
        """Step those parameters of a group that have a gradient; each is given with its position."""
        members = [Member(p, aligned_grad(p), self.states[p], i) for i, p in parameters if p.grad is not None]
        if id(group) not in self.options:
            self.options[id(group)] = Options.of(group)
        step = GroupStep(group, self.options[id(group)], self.scratch, self.background, self.ranks)
        self.chosen += step_group(step, members, self.layers, self.given_norms)
        self.stepped.update(id(member.parameter) for member in members)

    def advance_master(self, group: dict[str, Any], position: int, master: Tensor, grad: Tensor, out: Tensor) -> None:
        """Step the float32 master of a half-precision parameter and round it.

        Args:
            group: the parameter's group.
            position: its place among all parameters.
            master: float32; has its state in :attr:`states`, and no gradient of its own.
            grad: in half precision; sharded as the master is.
            out: the parameter's values, in half precision: this rank's part of them.
        """
        state, options = self.states[master], self.options[id(group)]
        if not options.projects(master) and options.fused is not False:
            begin_plain(group, Member(master, grad, state, position))
            tensors = [local(t.detach()) for t in (master, grad, out, state["exp_avg"], state["exp_avg_sq"])]
            if masters.takes(*tensors):
                state["step"] += 1
                masters.step_masters(
                    *tensors,
                    step=float(state["step"]),
                    lr=float(options.lr),
                    weight_decay=options.weight_decay,
                    betas=options.betas,
                    eps=options.eps,
                    scale=-1.0 if options.maximize else 1.0,
                )
                return
        master.grad = grad.to(torch.float32)
        self.advance(group, [(position, master)])
        master.grad = None
        out.copy_(local(master.detach()))
