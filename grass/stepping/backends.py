"""The arithmetic on selected rows, by the best of three implementations; :func:`step_rows` decides which.

==============================  ================================================================================
:mod:`grass.kernels`            Triton on CUDA: weights that are alike in one launch; narrow precision on any device
:mod:`grass.cpu.kernel`         float32 on the CPU, in one pass: all weights of a group in one call of compiled C++
:mod:`grass.stepping.operators`  everything else, by torch's operators
==============================  ================================================================================

The second also moves explored rows, weight by weight; elsewhere :mod:`grass.stepping.explored` does, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grass.batches import of_one_kind
from grass.cpu import kernel as cpu_kernel
from grass.kernels import compact_adamw_, compact_adamw_8bit_
from grass.kernels.dispatch import runs_triton
from grass.state.master import is_half
from grass.stepping.explored import step_explored
from grass.stepping.group import GroupStep, Numbers
from grass.stepping.operators import step_by_operators
from grass.stepping.rows import Numbered, Rows, ages_of, shared_by_kernels


def step_rows(step: GroupStep, every: Iterable[Rows]) -> None:
    """Step rows, whose counts include this step, and write them into their weights; then move explored rows."""
    batch, by_kernel, rest, exploring = cpu_kernel.Batch(step.options.fused), [], [], []
    triton: dict[object, bool] = {}
    for rows in every:
        numbers = _numbers(step, rows)
        explores_here = rows.explored is not None and type(rows.explored.grad) is Tensor  # not sharded
        if _takes_kernel(step, rows, triton):
            by_kernel.append((rows, numbers))
        elif rows.scale is None and batch.add(_cpu_weight(rows, numbers, explores_here)):
            if explores_here:
                continue
        else:
            rest.append((rows, numbers))
        if rows.explored is not None:
            exploring.append((rows, numbers))
    for alike in of_one_kind(by_kernel, shared_by_kernels):
        _step_by_kernel(step, alike)
    batch.run(**step.adam)
    step_by_operators(step, rest)
    step_explored(step, exploring)


def _numbers(step: GroupStep, rows: Rows) -> Numbers:
    """The numbers of a step. Explored rows decay for all their turns, with ``decay="all"`` as the selected ones."""
    explored, options = rows.explored, step.options
    numbers = step.numbers(rows.state, 1.0 if explored is None else explored.auto_scale)
    if rows.in_weight and decays_whole(step, rows):
        return numbers._replace(shrink=1.0)
    if explored is None:
        return numbers
    turns = 1.0 if options.decay == "all" else explored.turns
    return numbers._replace(explored_shrink=max(0.0, 1 - (1 - numbers.shrink) * turns))


def decays_whole(step: GroupStep, rows: Rows) -> bool:
    """Whether the whole weight is decayed before the step of its rows: all of them decay, and in dense mode."""
    every = rows.explored is not None and rows.explored.indices is None
    return rows.in_weight and (every or step.options.decay == "all") and step.options.weight_decay != 0


def _takes_kernel(step: GroupStep, rows: Rows, triton: dict[object, bool]) -> bool:
    """Whether rows go through :func:`grass.kernels.compact_adamw_`; ``triton`` remembers which devices and types do."""
    values, options = rows.weight if rows.values is None else rows.values, step.options
    if rows.scale is not None or type(values) is not Tensor:
        return False
    if options.moment_dtype != "float32" or (options.stochastic_rounding and is_half(values.dtype)):
        return True
    kind = values.device, values.dtype, rows.grad.dtype
    if kind not in triton:
        triton[kind] = runs_triton("compact_adamw_", values, rows.grad)
    return triton[kind]


def _cpu_weight(rows: Rows, numbers: Numbers, explores: bool) -> cpu_kernel.Weight:
    state, explored = rows.state, rows.explored if explores else None
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    return cpu_kernel.Weight(  # by position, which is faster
        rows.weight, rows.indices, rows.dim, rows.grad, rows.values, exp_avg, exp_avg_sq,
        numbers.row_steps, numbers.step_size, numbers.shrink, explored, numbers.explored_shrink,
    )  # fmt: skip


def _step_by_kernel(step: GroupStep, alike: list[Numbered]) -> None:
    """Step by the kernel for the precision of the moments, which it rounds and stores itself."""
    first, numbers = alike[0]
    every, places = [rows for rows, _ in alike], [rows.place() for rows, _ in alike]
    coded = "exp_avg_scale" in first.state
    names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale") if coded else ("exp_avg", "exp_avg_sq")
    kernel: Any = compact_adamw_8bit_ if coded else compact_adamw_
    rounds, codes = step.options.stochastic_rounding, coded or first.state["exp_avg"].dtype == torch.bfloat16
    keys = [step.key(rows.index, rows.state) for rows in every] if rounds or codes else None
    kernel(
        [place.weight for place in places],
        [place.indices for place in places],
        [rows.grad for rows in every],
        *([rows.state[name] for rows in every] for name in names),
        dim=first.dim,
        rows=None if places[0].rows is None else [place.rows for place in places],
        gather_grad=first.in_weight,
        keys=keys if rounds else None,
        moment_keys=keys if codes else None,
        row_steps=ages_of(alike),
        step_size=numbers.step_size,
        shrink=numbers.shrink,
        **step.adam,
    )
