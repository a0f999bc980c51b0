"""Half-precision parameters that are stepped in float32: the optimizer keeps a master of each, and rounds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grass.cpu import masters as kernel
from grass.parallel.shards import local
from grass.stepping.group import Member
from grass.stepping.optimizer_step import OptimizerStep
from grass.stepping.plain import begin_plain


def step_master(
    whole: OptimizerStep, group: dict[str, Any], position: int, master: Tensor, grad: Tensor, out: Tensor
) -> None:
    """Step a master and round it.

    Args:
        whole: the step; it has the master's state.
        group: the parameter's group.
        position: its place among all parameters.
        master: float32; has no gradient of its own.
        grad: in half precision; sharded as the master is.
        out: the parameter's values, in half precision: this rank's part of them.
    """
    state, options = whole.states[master], whole.options[id(group)]
    if not options.projects(master) and options.fused is not False:
        member = Member(master, grad, state, position)
        begin_plain(group, member)
        tensors = [local(t.detach()) for t in (master, grad, out, state["exp_avg"], state["exp_avg_sq"])]
        if kernel.takes(*tensors):
            state["step"] += 1
            kernel.step_masters(
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
    whole.advance(group, [(position, master)])
    master.grad = None
    out.copy_(local(master.detach()))
