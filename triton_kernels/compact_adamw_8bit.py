r"""One AdamW step of chosen rows of weights, with moments in 8-bit codes (:mod:`grass.kernels.moment_codes`).

For every block of 256 consecutive values of ``M`` and ``sqrt(V)``, in the order of memory, with code tables ``L``::

    M = L[code] scale                         V = (L'[code'] scale')^2
    the step of :mod:`compact_adamw`
    scale  <- max |M|                         scale' <- max sqrt(V)
    code   <- the level below or above M / scale, by chance, right in expectation;  code' likewise

The random bits are those of streams 1 and 2; the counter is a value's place in memory. The level below is found by
halving, in eight loads from a table of 256 floats. Blocks run over rows.

Floor in bytes, with a bfloat16 weight and its full bfloat16 gradient: ``10 r n``, with float32 ``rows`` and their
gradient ``18 r n``; and ``r n / 16`` for the scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .compact_adamw import _correction, _store
from .compact_adamw import _twin as compact_adamw_twin
from .dispatch import kernel_op
from .language import cdiv, jit, logarithm, narrowed, tl
from .moment_codes import decode_moment, dynamic_map, encode_moment
from .random_bits import Stream, random_bits, random_bits_kernel
from .together import batches_of_alike, first_of, from_table, located, table_of


def compact_adamw_8bit_(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    row_steps: Sequence[Tensor] | float,
    *,
    dim: int = 0,
    rows: Sequence[Tensor] | None = None,
    gather_grad: bool = False,
    step_size: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    shrink: float = 1.0,
    maximize: bool = False,
    keys: Sequence[int] | None = None,
    moment_keys: Sequence[int],
) -> None:
    """:func:`compact_adamw_` with moments in codes; updates these and their scales in place too.

    Args:
        weights: as in :func:`compact_adamw_`.
        indices: as in :func:`compact_adamw_`.
        grads: as in :func:`compact_adamw_`.
        exp_avgs: codes of ``M``, each uint8, ``(r, n)`` (``(m, r)``), dense: row-major or column-major.
        exp_avg_scales: of each float32, one for every 256 of them in the order of memory.
        exp_avg_sqs: codes of ``sqrt(V)``, in the layout of ``exp_avgs``.
        exp_avg_sq_scales: the scales of ``exp_avg_sqs``.
        row_steps: as in :func:`compact_adamw_`.
        dim: as in :func:`compact_adamw_`.
        rows: as in :func:`compact_adamw_`.
        gather_grad: as in :func:`compact_adamw_`.
        step_size: as in :func:`compact_adamw_`.
        betas: as in :func:`compact_adamw_`.
        eps: as in :func:`compact_adamw_`.
        shrink: as in :func:`compact_adamw_`.
        maximize: as in :func:`compact_adamw_`.
        keys: as in :func:`compact_adamw_`.
        moment_keys: of the rounding of the moments.
    """
    ages, step = (row_steps, 0.0) if isinstance(row_steps, Sequence) else (None, float(row_steps))
    numbers = dim, step, step_size, *betas, eps, shrink, maximize, gather_grad
    columns = weights, indices, rows, grads, exp_avgs, exp_avg_scales, exp_avg_sqs, exp_avg_sq_scales, ages
    for *tensors, own_keys, own_moment_keys in batches_of_alike(columns, (keys, moment_keys)):
        _compact_adamw_8bit(*tensors, *numbers, own_keys, own_moment_keys)


def _twin(
    weights: list[Tensor],
    indices: list[Tensor],
    rows: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sqs: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    ages: list[Tensor],
    dim: int,
    step: float,
    step_size: float,
    beta1: float,
    beta2: float,
    eps: float,
    shrink: float,
    maximize: bool,
    gather_grad: bool,
    keys: list[int],
    moment_keys: list[int],
) -> None:
    numbers = dim, step, step_size, beta1, beta2, eps, shrink, maximize, gather_grad
    for i, moment_key in enumerate(moment_keys):
        first = decode_moment(exp_avgs[i], exp_avg_scales[i], signed=True)
        second = decode_moment(exp_avg_sqs[i], exp_avg_sq_scales[i], signed=False).square_()
        one = slice(i, i + 1)
        tensors = weights[one], indices[one], rows[one], grads[one], [first], [second], ages[one]
        arguments: Any = (*tensors, *numbers, keys[one], [])
        compact_adamw_twin(*arguments)
        for codes, scale, value, stream in (
            (exp_avgs[i], exp_avg_scales[i], first, Stream.EXP_AVG),
            (exp_avg_sqs[i], exp_avg_sq_scales[i], second.sqrt_(), Stream.EXP_AVG_SQ),
        ):
            place = torch.arange(codes.numel(), device=codes.device)
            bits = random_bits(place, moment_key, stream)
            new_codes, new_scale = encode_moment(value, stream == Stream.EXP_AVG, bits)
            codes.copy_(new_codes)
            scale.copy_(new_scale)


def _launch(
    weights: list[Tensor],
    indices: list[Tensor],
    rows: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sqs: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    ages: list[Tensor],
    dim: int,
    step: float,
    step_size: float,
    beta1: float,
    beta2: float,
    eps: float,
    shrink: float,
    maximize: bool,
    gather_grad: bool,
    keys: list[int],
    moment_keys: list[int],
) -> None:
    scales = exp_avg_scales, exp_avg_sq_scales
    columns = weights, indices, rows or weights, grads, exp_avgs, scales[0], exp_avg_sqs, scales[1], ages
    table, aligned = table_of(columns, (keys, moment_keys))
    weight, chosen, values, grad, exp_avg, first_scale, exp_avg_sq, second_scale, age = first_of(columns, dim)
    r, n = exp_avg.shape
    levels = [dynamic_map(signed, str(weight.device)) for signed in (True, False)]
    logs = logarithm(beta1), logarithm(beta2)
    strides = *weight.stride(), *values.stride(), *grad.stride()
    hyperparameters = step, step_size, *logs, 1 - beta1, beta2, 1 - beta2, eps, shrink, -1.0 if maximize else 1.0
    flags = not exp_avg.is_contiguous(), bool(rows), gather_grad, bool(ages), bool(keys), aligned
    _compact_adamw_8bit_kernel[cdiv(r * n, 1024), 1, len(weights)](
        weight, chosen, values, grad, exp_avg, first_scale, exp_avg_sq, second_scale, age, *levels, table, r, n,
        *strides, *hyperparameters, *flags,
    )  # fmt: skip


@jit
def _encoded(x, levels, counter, key, STREAM: tl.constexpr, LAST: tl.constexpr):
    """Codes of ``x (blocks, 256)`` and the scales of its blocks, of a table whose last index is ``LAST``."""
    broken = tl.max((x != x).to(tl.int32), axis=1) > 0  # a maximum passes over NaN
    scale = tl.where(broken, float("nan"), tl.max(tl.abs(x), axis=1))
    unit = x / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
    lower = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(8):
        probe = lower + (128 >> i)
        reached = (probe < LAST) & (tl.load(levels + tl.minimum(probe, LAST)) <= unit)
        lower = tl.where(reached, probe, lower)
    below, above = tl.load(levels + lower), tl.load(levels + lower + 1)
    chance = (random_bits_kernel(counter, key, STREAM) >> 8).to(tl.float32) * 5.9604644775390625e-08
    return lower + (chance < (unit - below) / (above - below)).to(tl.int32), scale


@jit
def _compact_adamw_8bit_kernel(
    weight, indices, values, grad, first_codes, first_scale, second_codes, second_scale, ages,
    signed_levels, levels, table, r, n,
    weight_row, weight_col, value_row, value_col, grad_row, grad_col,
    step, step_size, log_beta1, log_beta2, complement1, beta2, complement2, eps, shrink, sign,
    COLUMN_MAJOR: tl.constexpr, HAS_ROWS: tl.constexpr, GATHER_GRAD: tl.constexpr, PER_ROW: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    first_at, second_at = located(first_codes, table, 4, ALIGNED), located(second_codes, table, 6, ALIGNED)

    block = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)
    lane = tl.arange(0, 4)[:, None] * 256 + tl.arange(0, 256)[None, :]
    start = tl.program_id(0).to(tl.int64) * 1024
    place = start + lane
    size = tl.full([], 1, tl.int64) * r * n
    inside, has_block = place < size, block * 256 < size
    width = r if COLUMN_MAJOR else n  # of a line of memory
    line = start // width
    within = (start - line * width).to(tl.int32) + lane
    line, across = line + within // width, within % width
    row, col = (across.to(tl.int64), line) if COLUMN_MAJOR else (line, across.to(tl.int64))

    target = tl.load(located(indices, table, 1, ALIGNED) + row, mask=inside, other=0)
    if PER_ROW:
        steps = tl.load(located(ages, table, 8, ALIGNED) + row, mask=inside, other=1.0)
    else:
        steps = tl.full([1, 1], 0.0, tl.float32) + step
    grad = located(grad, table, 3, ALIGNED)
    g_at = grad + (target if GATHER_GRAD else row) * grad_row + col * grad_col
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32) * sign
    m = tl.load(signed_levels + tl.load(first_at + place, mask=inside, other=127).to(tl.int32))
    v = tl.load(levels + tl.load(second_at + place, mask=inside, other=0).to(tl.int32))
    m *= tl.load(located(first_scale, table, 5, ALIGNED) + block, mask=has_block, other=0.0)[:, None]
    v *= tl.load(located(second_scale, table, 7, ALIGNED) + block, mask=has_block, other=0.0)[:, None]
    values = located(values, table, 2, ALIGNED)
    value_at = values + (row if HAS_ROWS else target) * value_row + col * value_col
    w = tl.load(value_at, mask=inside, other=0.0).to(tl.float32)

    m += (g - m) * complement1
    v = v * v * beta2 + g * g * complement2
    root = tl.sqrt(v)
    rate = step_size / _correction(steps, log_beta1)
    w = w * shrink - rate * (m / (root / tl.sqrt(_correction(steps, log_beta2)) + eps))

    moment_key = from_table(table, 10)
    codes, scale = _encoded(m, signed_levels, place, moment_key, 1, 254)
    tl.store(located(first_codes, table, 4, ALIGNED) + place, codes.to(tl.uint8), mask=inside)
    tl.store(located(first_scale, table, 5, ALIGNED) + block, scale, mask=has_block)
    codes, scale = _encoded(root, levels, place, moment_key, 2, 255)
    tl.store(located(second_codes, table, 6, ALIGNED) + place, codes.to(tl.uint8), mask=inside)
    tl.store(located(second_scale, table, 7, ALIGNED) + block, scale, mask=has_block)
    w = _store(value_at, w, inside, target * n + col, from_table(table, 9), 0, STOCHASTIC)
    if HAS_ROWS:
        weight = located(weight, table, 0, ALIGNED)
        weight_at = weight + target * weight_row + col * weight_col
        tl.store(weight_at, narrowed(w.to(tl.float32), weight.dtype.element_ty), mask=inside)


_compact_adamw_8bit = kernel_op(
    "compact_adamw_8bit_(Tensor(a!)[] weights, Tensor[] indices, Tensor(b!)[] rows, Tensor[] grads, "
    "Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_scales, Tensor(e!)[] exp_avg_sqs, Tensor(f!)[] exp_avg_sq_scales, "
    "Tensor[] ages, int dim, float step, float step_size, float beta1, float beta2, float eps, float shrink, "
    "bool maximize, bool gather_grad, int[] keys, int[] moment_keys) -> ()",
    twin=_twin,
    launch=_launch,
    fake=lambda *_: None,
    types=frozenset({torch.uint8}),
)
