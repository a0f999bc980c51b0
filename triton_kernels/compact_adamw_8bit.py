r"""One AdamW step of chosen rows, in one pass, with moments in 8-bit codes (:mod:`grass.kernels.moment_codes`).

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

import torch
from torch import Tensor

from .compact_adamw import _correction, _store, moment_words
from .compact_adamw import _twin as compact_adamw_twin
from .dispatch import kernel_op
from .language import cdiv, jit, logarithm, narrowed, tl
from .moment_codes import decode_moment, dynamic_map, encode_moment
from .random_bits import Stream, key_words, random_bits, random_bits_kernel


def compact_adamw_8bit_(
    weight: Tensor,
    indices: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    row_steps: Tensor | float,
    *,
    dim: int = 0,
    rows: Tensor | None = None,
    gather_grad: bool = False,
    step_size: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    shrink: float = 1.0,
    maximize: bool = False,
    key: int | None = None,
    moment_key: int,
) -> None:
    """:func:`compact_adamw_` with moments in codes; updates these and their scales in place too.

    Args:
        weight: as in :func:`compact_adamw_`.
        indices: as in :func:`compact_adamw_`.
        grad: as in :func:`compact_adamw_`.
        exp_avg: codes of ``M``, uint8, ``(r, n)`` (``(m, r)``), dense: row-major or column-major.
        exp_avg_scale: float32, one for every 256 of them in the order of memory.
        exp_avg_sq: codes of ``sqrt(V)``, in the layout of ``exp_avg``.
        exp_avg_sq_scale: the scales of ``exp_avg_sq``.
        row_steps: as in :func:`compact_adamw_`.
        dim: as in :func:`compact_adamw_`.
        rows: as in :func:`compact_adamw_`.
        gather_grad: as in :func:`compact_adamw_`.
        step_size: as in :func:`compact_adamw_`.
        betas: as in :func:`compact_adamw_`.
        eps: as in :func:`compact_adamw_`.
        shrink: as in :func:`compact_adamw_`.
        maximize: as in :func:`compact_adamw_`.
        key: as in :func:`compact_adamw_`.
        moment_key: of the rounding of the moments.
    """
    if dim == 1:
        weight, grad, exp_avg, exp_avg_sq = weight.t(), grad.t(), exp_avg.t(), exp_avg_sq.t()
        rows = None if rows is None else rows.t()
    ages, step = (row_steps, 0.0) if isinstance(row_steps, Tensor) else (None, float(row_steps))
    tensors = weight, indices, rows, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, ages
    _compact_adamw_8bit(*tensors, step, step_size, *betas, eps, shrink, maximize, gather_grad, key, moment_key)


def _twin(
    weight: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    ages: Tensor | None,
    step: float,
    step_size: float,
    beta1: float,
    beta2: float,
    eps: float,
    shrink: float,
    maximize: bool,
    gather_grad: bool,
    key: int | None,
    moment_key: int,
) -> None:
    first = decode_moment(exp_avg, exp_avg_scale, signed=True)
    second = decode_moment(exp_avg_sq, exp_avg_sq_scale, signed=False).square_()
    numbers = step, step_size, beta1, beta2, eps, shrink, maximize, gather_grad, key, None
    compact_adamw_twin(weight, indices, rows, grad, first, second, ages, *numbers)
    place = torch.arange(exp_avg.numel(), device=exp_avg.device)
    for codes, scale, value, stream in (
        (exp_avg, exp_avg_scale, first, Stream.EXP_AVG),
        (exp_avg_sq, exp_avg_sq_scale, second.sqrt_(), Stream.EXP_AVG_SQ),
    ):
        new_codes, new_scale = encode_moment(value, stream == Stream.EXP_AVG, random_bits(place, moment_key, stream))
        codes.copy_(new_codes)
        scale.copy_(new_scale)


def _launch(
    weight: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    ages: Tensor | None,
    step: float,
    step_size: float,
    beta1: float,
    beta2: float,
    eps: float,
    shrink: float,
    maximize: bool,
    gather_grad: bool,
    key: int | None,
    moment_key: int,
) -> None:
    r, n = exp_avg.shape
    values = weight if rows is None else rows
    levels = [dynamic_map(signed, str(weight.device)) for signed in (True, False)]
    logs = logarithm(beta1), logarithm(beta2)
    words = *key_words(key or 0), *moment_words(moment_key)
    strides = *weight.stride(), *values.stride(), *grad.stride()
    hyperparameters = step, step_size, *logs, 1 - beta1, beta2, 1 - beta2, eps, shrink, -1.0 if maximize else 1.0
    flags = not exp_avg.is_contiguous(), rows is not None, gather_grad, ages is not None, key is not None
    _compact_adamw_8bit_kernel[(cdiv(r * n, 1024),)](
        weight, indices, values, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, ages, *levels, r, n,
        *strides, *hyperparameters, *words, *flags,
    )  # fmt: skip


@jit
def _encoded(x, levels, counter, key_low, key_high, LAST: tl.constexpr):
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
    chance = (random_bits_kernel(counter, key_low, key_high) >> 8).to(tl.float32) * 5.9604644775390625e-08
    return lower + (chance < (unit - below) / (above - below)).to(tl.int32), scale


@jit
def _compact_adamw_8bit_kernel(
    weight, indices, values, grad, first_codes, first_scale, second_codes, second_scale, ages,
    signed_levels, levels, r, n,
    weight_row, weight_col, value_row, value_col, grad_row, grad_col,
    step, step_size, log_beta1, log_beta2, complement1, beta2, complement2, eps, shrink, sign,
    key_low, key_high, moment_low, first_high, second_high,
    COLUMN_MAJOR: tl.constexpr, HAS_ROWS: tl.constexpr, GATHER_GRAD: tl.constexpr, PER_ROW: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
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

    target = tl.load(indices + row, mask=inside, other=0)
    steps = tl.load(ages + row, mask=inside, other=1.0) if PER_ROW else tl.full([1, 1], 0.0, tl.float32) + step
    g_at = grad + (target if GATHER_GRAD else row) * grad_row + col * grad_col
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32) * sign
    m = tl.load(signed_levels + tl.load(first_codes + place, mask=inside, other=127).to(tl.int32))
    v = tl.load(levels + tl.load(second_codes + place, mask=inside, other=0).to(tl.int32))
    m *= tl.load(first_scale + block, mask=has_block, other=0.0)[:, None]
    v *= tl.load(second_scale + block, mask=has_block, other=0.0)[:, None]
    value_at = values + (row if HAS_ROWS else target) * value_row + col * value_col
    w = tl.load(value_at, mask=inside, other=0.0).to(tl.float32)

    m += (g - m) * complement1
    v = v * v * beta2 + g * g * complement2
    root = tl.sqrt(v)
    rate = step_size / _correction(steps, log_beta1)
    w = w * shrink - rate * (m / (root / tl.sqrt(_correction(steps, log_beta2)) + eps))

    codes, scale = _encoded(m, signed_levels, place, moment_low, first_high, 254)
    tl.store(first_codes + place, codes.to(tl.uint8), mask=inside)
    tl.store(first_scale + block, scale, mask=has_block)
    codes, scale = _encoded(root, levels, place, moment_low, second_high, 255)
    tl.store(second_codes + place, codes.to(tl.uint8), mask=inside)
    tl.store(second_scale + block, scale, mask=has_block)
    w = _store(value_at, w, inside, target * n + col, key_low, key_high, STOCHASTIC)
    if HAS_ROWS:
        weight_at = weight + target * weight_row + col * weight_col
        tl.store(weight_at, narrowed(w.to(tl.float32), weight.dtype.element_ty), mask=inside)


_compact_adamw_8bit = kernel_op(
    "compact_adamw_8bit_(Tensor(a!) weight, Tensor indices, Tensor(b!)? rows, Tensor grad, Tensor(c!) exp_avg, "
    "Tensor(d!) exp_avg_scale, Tensor(e!) exp_avg_sq, Tensor(f!) exp_avg_sq_scale, Tensor? ages, float step, "
    "float step_size, float beta1, float beta2, float eps, float shrink, bool maximize, bool gather_grad, int? key, "
    "int moment_key) -> ()",
    twin=_twin,
    launch=_launch,
    fake=lambda *_: None,
    types=frozenset({torch.uint8}),
)
