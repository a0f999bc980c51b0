"""Chosen rows stepped by torch's operators: gathered, stepped, put back, as many weights at a time as stay in cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from grass.functional import put_back_, rows_to_step
from grass.kernels.arithmetic import StepCoefficients, adamw_
from grass.state.precision import full_moments
from grass.stepping.group import GroupStep, Numbers
from grass.stepping.plain import torch_adamw
from grass.stepping.rows import Rows

BUCKET = 2**17
"""Elements stepped at once: enough small weights to pay for the calls, few enough to stay in a processor's cache."""

Numbered = tuple[Rows, Numbers]


def step_by_operators(step: GroupStep, every: list[Numbered]) -> None:
    """Step rows and write them into their weights."""
    precision = step.options.moment_dtype
    for bucket in _buckets(every):
        with ExitStack() as stack:
            for rows, _ in bucket if precision != "float32" else ():
                stack.enter_context(full_moments(rows.state, precision, step.key(rows.index, rows.state)))
            _step(step, bucket)


def _buckets(every: list[Numbered]) -> Iterator[list[Numbered]]:
    """Split into parts that are stepped alike, of at most :data:`BUCKET` elements, or one weight.

    The bits of a weight then do not depend on the others: it is stepped by the same operators alone.
    """
    bucket: list[Numbered] = []
    size, kind = 0, None
    for rows, numbers in every:
        moment = rows.state["exp_avg"]
        its_kind = moment.dtype, moment.device, _shared_numbers(rows, numbers)
        if bucket and (size + moment.numel() > BUCKET or its_kind != kind):
            yield bucket
            bucket, size = [], 0
        bucket.append((rows, numbers))
        size, kind = size + moment.numel(), its_kind
    if bucket:
        yield bucket


def _step(step: GroupStep, bucket: list[Numbered]) -> None:
    every = [rows for rows, _ in bucket]
    exp_avgs, exp_avg_sqs = ([rows.state[key] for rows in every] for key in ("exp_avg", "exp_avg_sq"))
    scratch = step.scratch.like(0, exp_avgs)
    if every[0].values is None:
        grads = [_compact_grad(rows, out) for rows, out in zip(every, scratch, strict=True)]
        places = zip(every, step.scratch.like(1, exp_avgs), strict=True)
        values = [rows_to_step(rows.stepped(), rows.projector(), out) for rows, out in places]
    else:
        grads = [rows.grad.to(rows.state["exp_avg"].dtype) for rows in every]
        values = [rows.stepped().to(rows.state["exp_avg"].dtype) for rows in every]
    tensors = values, grads, exp_avgs, exp_avg_sqs
    if _shared_numbers(*bucket[0]) is not None and all(map(_share_layout, *tensors)):
        _step_as_parameters(step, bucket, *tensors)
    else:
        shrinks = [numbers.shrink for _, numbers in bucket]
        adamw_(*tensors, _coefficients(step, bucket), shrinks, scratch, **step.adam)
    for (rows, numbers), stepped in zip(bucket, values, strict=True):
        _put_back(rows, stepped, numbers.shrink)


def _compact_grad(rows: Rows, out: Tensor) -> Tensor:
    projector = rows.projector()
    return projector.rescale(projector.gather(rows.grad, out=out))


def _shared_numbers(rows: Rows, numbers: Numbers) -> tuple[float, float] | None:
    """Step size and shrink of rows that torch's AdamW can step; ``None`` for scaled rows and rows of several ages."""
    if rows.scale is not None or isinstance(numbers.row_steps, Tensor):
        return None
    return numbers.step_size, numbers.shrink


def _share_layout(*tensors: Tensor) -> bool:
    return len({t.stride() for t in tensors}) == 1


def _step_as_parameters(step: GroupStep, bucket: list[Numbered], *tensors: list[Tensor]) -> None:
    """Step values, given with gradients and moments, as torch steps parameters: in one pass over memory."""
    _, lr, shrink = bucket[0][1]
    before = [numbers.row_steps - 1.0 for _, numbers in bucket]
    ages = torch.tensor(before, dtype=torch.float32, device=tensors[0][0].device)
    values, grads, exp_avgs, exp_avg_sqs = tensors
    decay = (1 - shrink) / lr if lr else 0.0
    torch_adamw(step, values, grads, exp_avgs, exp_avg_sqs, list(ages.unbind()), lr, decay)


def _coefficients(step: GroupStep, bucket: list[Numbered]) -> list[StepCoefficients]:
    """Of each weight, shaped to broadcast over its rows."""
    counts = [rows.indices.numel() for rows, _ in bucket]
    like = bucket[0][0].state["exp_avg"]
    ages = [
        steps if isinstance(steps, Tensor) else like.new_full((count,), steps)
        for (_, (steps, _, _)), count in zip(bucket, counts, strict=True)
    ]
    sizes = torch.tensor([numbers.step_size for _, numbers in bucket], dtype=torch.float64)
    sizes = sizes.repeat_interleave(torch.tensor(counts), output_size=sum(counts)).to(like)
    every = StepCoefficients.at(torch.cat(ages), sizes, step.options.betas)
    parts = zip(torch.split(every.step_size, counts), torch.split(every.denominator, counts), strict=True)
    return [StepCoefficients(*part).along(rows.dim) for (rows, _), part in zip(bucket, parts, strict=True)]


def _put_back(rows: Rows, stepped: Tensor, shrink: float) -> None:
    """Write stepped values to where they came from, active rows into their weight too."""
    if rows.values is None:
        put_back_(rows.stepped(), rows.projector(), stepped, shrink)
        return
    if stepped is not rows.values:
        rows.values.copy_(stepped)
    if rows.weight is not None:
        rows.projector().scatter_(rows.weight, rows.values)
