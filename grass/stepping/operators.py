"""Selected rows stepped by torch's operators: gather, step, put back; as many weights at a time as fit in cache."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from grass.batches import batches
from grass.kernels.arithmetic import StepCoefficients, adamw_
from grass.state.precision import full_moments
from grass.stepping.group import GroupStep, Numbers
from grass.stepping.plain import torch_adamw
from grass.stepping.rows import Numbered, Rows

BUCKET = 2**17
"""Largest number of elements to step at once, so that they fit in a processor's cache."""


def step_by_operators(step: GroupStep, every: list[Numbered]) -> None:
    """Step rows and write them into their weights."""
    precision = step.options.moment_dtype
    for bucket in batches(every, lambda item: item[0].state["exp_avg"].numel(), BUCKET, _kind):
        with ExitStack() as stack:
            for rows, _ in bucket if precision != "float32" else ():
                stack.enter_context(full_moments(rows.state, precision, step.key(rows.index, rows.state)))
            _step(step, bucket)


def _kind(item: Numbered) -> object:
    """Rows of one kind are stepped by the same operators, so a weight's bits do not depend on other weights."""
    moment = item[0].state["exp_avg"]
    return moment.dtype, moment.device, _shared_numbers(*item)


def _step(step: GroupStep, bucket: list[Numbered]) -> None:
    every = [rows for rows, _ in bucket]
    exp_avgs, exp_avg_sqs = ([rows.state[key] for rows in every] for key in ("exp_avg", "exp_avg_sq"))
    scratch = step.scratch.like(0, exp_avgs)
    grads = [rows.gather_grad(out) for rows, out in zip(every, scratch, strict=True)]
    places = step.scratch.like(1, exp_avgs) if every[0].in_weight else scratch
    values = [rows.gather(out) for rows, out in zip(every, places, strict=True)]
    tensors = values, grads, exp_avgs, exp_avg_sqs
    if _shared_numbers(*bucket[0]) is not None and all(map(_share_layout, *tensors)):
        _step_as_parameters(step, bucket, *tensors)
    else:
        shrinks = [numbers.shrink for _, numbers in bucket]
        adamw_(*tensors, _coefficients(step, bucket), shrinks, scratch, **step.adam)
    for (rows, numbers), stepped in zip(bucket, values, strict=True):
        rows.put(stepped, numbers.shrink)


def _shared_numbers(rows: Rows, numbers: Numbers) -> tuple[float, float] | None:
    """Step size and shrink of rows that torch's AdamW can step; ``None`` for scaled rows and rows of several ages."""
    if rows.scale is not None or isinstance(numbers.row_steps, Tensor):
        return None
    return numbers.step_size, numbers.shrink


def _share_layout(*tensors: Tensor) -> bool:
    return len({t.stride() for t in tensors}) == 1


def _step_as_parameters(step: GroupStep, bucket: list[Numbered], *tensors: list[Tensor]) -> None:
    """Step values, given with gradients and moments, as torch steps parameters: in one pass over memory."""
    _, lr, shrink, _ = bucket[0][1]
    before = [numbers.row_steps - 1.0 for _, numbers in bucket]
    ages = torch.tensor(before, dtype=torch.float32, device=tensors[0][0].device)
    values, grads, exp_avgs, exp_avg_sqs = tensors
    decay = (1 - shrink) / lr if lr else 0.0
    torch_adamw(step, values, grads, exp_avgs, exp_avg_sqs, list(ages.unbind()), lr, decay)


def _coefficients(step: GroupStep, bucket: list[Numbered]) -> list[StepCoefficients]:
    """The coefficients of each weight, shaped to broadcast over its rows."""
    counts = [rows.indices.numel() for rows, _ in bucket]
    like = bucket[0][0].state["exp_avg"]
    ages = [
        steps if isinstance(steps, Tensor) else like.new_full((count,), steps)
        for (_, (steps, *_)), count in zip(bucket, counts, strict=True)
    ]
    sizes = torch.tensor([numbers.step_size for _, numbers in bucket], dtype=torch.float64, device="cpu")
    sizes = sizes.repeat_interleave(torch.tensor(counts, device="cpu"), output_size=sum(counts)).to(like)
    precise = torch.cat(ages).to(torch.promote_types(like.dtype, torch.float32))
    every = StepCoefficients.at(precise, sizes, step.options.betas)
    parts = zip(torch.split(every.step_size, counts), torch.split(every.denominator, counts), strict=True)
    return [StepCoefficients(*part).along(rows.dim) for (rows, _), part in zip(bucket, parts, strict=True)]
