"""Parameters at full rank: torch's own AdamW, also of float32 masters, or AdamW with stochastic rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from grass.kernels import compact_adamw_
from grass.kernels.layout import is_dense
from grass.options import as_matrix
from grass.parallel.shards import local
from grass.private_names import devices_of_fused_kernels
from grass.state.master import begin_master, follow_, is_half, keeps_master
from grass.stepping.group import GroupStep, Member


def step_plain(step: GroupStep, members: list[Member]) -> None:
    """Step parameters as ``torch.optim.AdamW`` does; of those with a master the master, which is then rounded."""
    if not members:
        return
    for member in members:
        begin_plain(step.group, member)
    rounded = [m for m in members if "master" in m.state]
    masters, values = [local(m.state["master"]) for m in rounded], [local(m.parameter.detach()) for m in rounded]
    follow_(masters, values)
    whole = [m for m in members if "master" not in m.state]
    members = whole + rounded
    torch_adamw(
        step,
        [local(m.parameter) for m in whole] + masters,
        [local(m.grad) for m in whole] + [local(m.grad).to(torch.float32) for m in rounded],
        [local(m.state["exp_avg"]) for m in members],
        [local(m.state["exp_avg_sq"]) for m in members],
        [m.state["step"] for m in members],
        step.options.lr,
        step.options.weight_decay,
    )
    if rounded:
        torch._foreach_copy_(values, masters)


def is_rounded(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter at full rank is rounded stochastically: on request, in half precision, without a master."""
    return group["stochastic_rounding"] and is_half(p.dtype) and not keeps_master(p)


def step_rounded(step: GroupStep, member: Member) -> None:
    """Step a half-precision parameter with moments of its dtype, all rounded stochastically."""
    begin_plain(step.group, member)
    p, grad, state, index = member
    state["step"] += 1
    key, age = step.key(index, state), float(state["step"])
    parts = [local(t.detach()) for t in (p, grad, state["exp_avg"], state["exp_avg_sq"])]
    weight, *rest = (as_matrix(t) if t.ndim > 1 else t.reshape(1, -1) for t in parts)
    every = torch.arange(weight.shape[0], device=weight.device)
    numbers = {"step_size": step.lr, "shrink": 1 - step.lr * step.options.weight_decay, **step.adam}
    compact_adamw_([weight], [every], *([t] for t in rest), age, **numbers, keys=[key], moment_keys=[key])
    for part, stepped in ((parts[0], weight), (parts[2], rest[1]), (parts[3], rest[2])):
        if part.data_ptr() != stepped.data_ptr():  # a copy: channels_last
            part.copy_(stepped.view(part.shape))


def torch_adamw(
    step: GroupStep,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    """AdamW by torch: fused where that is supported and correct, otherwise unfused; increments ``steps``."""
    columns = params, grads, exp_avgs, exp_avg_sqs, steps
    options = step.options
    allowed = options.fused is not False and not options.foreach
    flags = [allowed and _takes_fused(*row) for row in zip(*columns[:4], strict=True)]
    for fused in set(flags):
        parts = [[t for t, flag in zip(column, flags, strict=True) if flag == fused] for column in columns]
        adamw(
            parts[0],
            parts[1],
            parts[2],
            parts[3],
            [],
            parts[4],
            fused=fused or None,
            foreach=None if fused else options.foreach,
            amsgrad=False,
            beta1=options.betas[0],
            beta2=options.betas[1],
            lr=lr if fused else float(lr),
            weight_decay=weight_decay,
            eps=options.eps,
            maximize=options.maximize,
        )


def step_device(p: Tensor, group: dict[str, Any]) -> torch.device | str:
    """The device on which the step count of a plain parameter has to be."""
    return p.device if _has_fused_adamw(p) and not is_rounded(p, group) else "cpu"


def begin_plain(group: dict[str, Any], member: Member) -> None:
    """Make the state of a parameter at full rank, if it has none.

    Raises:
        RuntimeError: the parameter has another shape than its state: kernels would read past the end of the moments.
    """
    p, state = member.parameter, member.state
    if state and state["exp_avg"].shape != p.shape:
        raise RuntimeError(
            f"A parameter of {tuple(p.shape)} has moments of {tuple(state['exp_avg'].shape)}: it was resized after its "
            "first step, as by resize_token_embeddings(). Build the optimizer after that"
        )
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=step_device(p, group))
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    begin_master(p, state)


def _has_fused_adamw(p: Tensor) -> bool:
    return p.device.type in devices_of_fused_kernels()


def _takes_fused(p: Tensor, *others: Tensor) -> bool:
    """Whether torch's fused kernel may step a parameter with this gradient and these moments.

    The CPU kernel walks the memory of all four in parallel and ignores their strides.
    """
    if not _has_fused_adamw(p):
        return False
    if p.is_contiguous() and all(t.is_contiguous() for t in others):
        return True
    return is_dense(p) and all(t.stride() == p.stride() for t in others)
