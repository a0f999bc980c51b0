"""AdamW on float32 masters of bfloat16 weights, in one pass of compiled C++."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grass.cpu.kernel import at_hand, library, threads


def takes(master: Tensor, grad: Tensor, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> bool:
    """Whether :func:`step_masters` can step these: on the CPU, of the right types, with the same strides."""
    wide, narrow = (master, exp_avg, exp_avg_sq), (grad, weight)
    every = [*wide, *narrow]
    return (
        all(type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu and t.stride() == master.stride() for t in every)
        and all(t.dtype == torch.float32 for t in wide)
        and all(t.dtype == torch.bfloat16 for t in narrow)
        and at_hand()
    )


def step_masters(
    master: Tensor,
    grad: Tensor,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    scale: float = 1.0,
) -> None:
    """One AdamW step of float32 ``master`` and its moments, in place; ``weight`` gets the rounded values.

    All have the same shape and dense strides (:func:`takes`).

    Args:
        master: float32, stepped.
        grad: bfloat16.
        weight: bfloat16, overwritten.
        exp_avg: float32 first moment.
        exp_avg_sq: float32 second moment.
        step: Adam steps, this one included.
        lr: learning rate.
        weight_decay: decoupled decay rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        scale: multiplies the gradient.
    """
    bias1, bias2 = 1 - betas[0] ** step, 1 - betas[1] ** step
    numbers = lr / bias1, 1 / math.sqrt(bias2), 1 - lr * weight_decay, 1 - betas[0], betas[1], 1 - betas[1], eps, scale
    addresses = (t.data_ptr() for t in (master, grad, weight, exp_avg, exp_avg_sq))
    library().step_masters(*addresses, master.numel(), *numbers, threads())
