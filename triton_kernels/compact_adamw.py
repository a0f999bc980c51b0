r"""One AdamW step of the chosen rows of weights, in one pass over them.

For row ``j`` of ``r``, which is row ``sigma_j`` of the weight ``W (m, n)``, at its own step ``t_j``::

    M_j <- M_j + (1 - beta1) (g_j - M_j)
    V_j <- beta2 V_j + (1 - beta2) g_j^2
    w_j <- shrink w_j - step_size / (1 - beta1^t_j)  M_j / (sqrt(V_j / (1 - beta2^t_j)) + eps)
    W[sigma_j] <- w_j

``w`` is a tensor of its own (``rows``, possibly finer than ``W``) or ``W[sigma]``. What is stored in half precision is
rounded stochastically where there is a key for it (:mod:`random_bits`): bit streams 0, 1, 2 for ``w``, ``M``, ``V``;
the counter of an element is its place ``sigma_j n + k`` in the weight.

Floor in bytes, all float32: ``28 r n`` on the weight's own rows (4 values read, 3 written), ``32 r n`` with ``rows``.
With a bfloat16 weight and float32 moments: ``22 r n`` on its own rows, ``30 r n`` with float32 ``rows`` and their
gradient. About ``15 r n`` FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from .arithmetic import StepCoefficients, adamw_
from .dispatch import kernel_op
from .language import cdiv, is_column_major, jit, logarithm, narrowed, tile, tl
from .random_bits import (
    Stream,
    random_bits,
    random_bits_kernel,
    round_stochastically,
    round_stochastically_kernel,
)
from .together import batches_of_alike, first_of, from_table, located, table_of


def compact_adamw_(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
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
    moment_keys: Sequence[int] | None = None,
) -> None:
    """Step the chosen rows (``dim=1``: columns) of each weight; also updates both moments and ``rows``, in place.

    Weights that are alike share a launch; the bits of each are those of a call for it alone.

    Args:
        weights: each ``(m, n)``, any strides.
        indices: of each weight int64 ``(r,)``, distinct, in ``[0, m)`` (``dim=1``: ``[0, n)``). Kernels do not check.
        grads: of each the compact gradient ``(r, n)`` (``(m, r)``), or with ``gather_grad`` the full one.
        exp_avgs: ``M`` of each, ``(r, n)`` (``(m, r)``).
        exp_avg_sqs: ``V``, likewise.
        row_steps: Adam steps of the rows, this one included: a number for all, or of each weight float ``(r,)``.
        dim: 0 for rows, 1 for columns.
        rows: the values ``w`` of each, ``(r, n)`` (``(m, r)``), where the weights' own do not serve.
        gather_grad: whether ``grads`` are the full gradients.
        step_size: the learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        shrink: ``1 - lr weight_decay``.
        maximize: ascend.
        keys: of stochastic rounding of each one's values, :func:`random_bits.make_key`; ``None`` rounds to nearest.
        moment_keys: the same for the moments.
    """
    ages, step = (row_steps, 0.0) if isinstance(row_steps, Sequence) else (None, float(row_steps))
    numbers = dim, step, step_size, *betas, eps, shrink, maximize, gather_grad
    columns = weights, indices, rows, grads, exp_avgs, exp_avg_sqs, ages
    for *tensors, own_keys, own_moment_keys in batches_of_alike(columns, (keys, moment_keys)):
        _compact_adamw(*tensors, *numbers, own_keys, own_moment_keys)


def _twin(
    weights: list[Tensor],
    indices: list[Tensor],
    rows: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
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
    matrices = (map(Tensor.t, column) if dim == 1 else column for column in (weights, grads, exp_avgs, exp_avg_sqs))
    owns = [own.t() for own in rows] if dim == 1 else rows
    columns = *matrices, indices, *(column or repeat(None) for column in (owns, ages, keys, moment_keys))
    for weight, grad, exp_avg, exp_avg_sq, chosen, own, age, key, moment_key in zip(*columns, strict=False):
        wide = torch.promote_types(exp_avg.dtype, torch.float32)
        first, second = exp_avg.to(wide), exp_avg_sq.to(wide)
        c = StepCoefficients.at(step if age is None else age.to(wide), step_size, (beta1, beta2)).along(0)
        compact = (grad.index_select(0, chosen) if gather_grad else grad).to(wide)
        old = weight.index_select(0, chosen) if own is None else own
        new = old.to(wide, copy=own is not None)
        adamw_([new], [compact], [first], [second], [c], [shrink], betas=(beta1, beta2), eps=eps, maximize=maximize)
        counter = chosen.unsqueeze(1) * weight.shape[1] + torch.arange(weight.shape[1], device=weight.device)
        for stream, moment, value in ((Stream.EXP_AVG, exp_avg, first), (Stream.EXP_AVG_SQ, exp_avg_sq, second)):
            if value is not moment:
                moment.copy_(_rounded(value, moment.dtype, counter, moment_key, stream))
        value = _rounded(new, old.dtype, counter, key, Stream.VALUES)
        if own is not None:
            own.copy_(value)
        weight.index_copy_(0, chosen, value.to(weight.dtype))


def _rounded(x: Tensor, dtype: torch.dtype, counter: Tensor, key: int | None, stream: Stream) -> Tensor:
    if key is None or x.dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    return round_stochastically(x, dtype, random_bits(counter, key, stream))


def _launch(
    weights: list[Tensor],
    indices: list[Tensor],
    rows: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
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
    columns = weights, indices, rows or weights, grads, exp_avgs, exp_avg_sqs, ages
    table, aligned = table_of(columns, (keys, moment_keys))
    weight, chosen, values, grad, exp_avg, exp_avg_sq, age = first_of(columns, dim)
    r, n = exp_avg.shape
    block_r, block_n = tile(r, n, is_column_major(weight), elements=1024)
    logs = logarithm(beta1), logarithm(beta2)
    strides = *weight.stride(), *values.stride(), *grad.stride(), *exp_avg.stride(), *exp_avg_sq.stride()
    hyperparameters = step, step_size, *logs, 1 - beta1, beta2, 1 - beta2, eps, shrink, -1.0 if maximize else 1.0
    flags = bool(rows), gather_grad, bool(ages), bool(keys), bool(moment_keys), aligned
    _compact_adamw_kernel[cdiv(r, block_r), cdiv(n, block_n), len(weights)](
        weight, chosen, values, grad, exp_avg, exp_avg_sq, age, table, r, n, *strides, *hyperparameters, *flags,
        block_r, block_n,
    )  # fmt: skip


@jit
def _correction(steps, log_beta):
    """``1 - beta^t``: a Taylor series where the difference would lose digits, to float32's precision."""
    z = steps * log_beta
    s = tl.maximum(z, -1.0)
    series = 1 + s / 6 * (1 + s / 7 * (1 + s / 8 * (1 + s / 9 * (1 + s / 10))))
    series = 1 + s / 2 * (1 + s / 3 * (1 + s / 4 * (1 + s / 5 * series)))
    return tl.where(z > -1.0, -s * series, 1 - tl.exp(z))


@jit
def _store(place, value, inside, counter, key, STREAM: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store ``value``, rounded to the type of ``place``; returns it so."""
    dtype: tl.constexpr = place.dtype.element_ty
    if STOCHASTIC and dtype != tl.float32:
        rounded = round_stochastically_kernel(value, dtype, random_bits_kernel(counter, key, STREAM))
    else:
        rounded = narrowed(value, dtype)
    tl.store(place, rounded, mask=inside)
    return rounded


@jit
def _compact_adamw_kernel(
    weight, indices, values, grad, exp_avg, exp_avg_sq, ages, table, r, n,
    weight_row, weight_col, value_row, value_col, grad_row, grad_col, m_row, m_col, v_row, v_col,
    step, step_size, log_beta1, log_beta2, complement1, beta2, complement2, eps, shrink, sign,
    HAS_ROWS: tl.constexpr, GATHER_GRAD: tl.constexpr, PER_ROW: tl.constexpr,
    STOCHASTIC: tl.constexpr, STOCHASTIC_MOMENTS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    weight, indices = located(weight, table, 0, ALIGNED), located(indices, table, 1, ALIGNED)
    values, grad = located(values, table, 2, ALIGNED), located(grad, table, 3, ALIGNED)
    exp_avg, exp_avg_sq = located(exp_avg, table, 4, ALIGNED), located(exp_avg_sq, table, 5, ALIGNED)
    key, moment_key = from_table(table, 7), from_table(table, 8)

    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    there = row < r
    target = tl.load(indices + row, mask=there, other=0)[:, None]
    if PER_ROW:
        steps = tl.load(located(ages, table, 6, ALIGNED) + row, mask=there, other=1.0)
    else:
        steps = tl.full([BLOCK_R], 0.0, tl.float32) + step
    size = (step_size / _correction(steps, log_beta1))[:, None]
    root = tl.sqrt(_correction(steps, log_beta2))[:, None]
    row, inside = row[:, None], there[:, None] & (col < n)

    grad_at = grad + (target if GATHER_GRAD else row) * grad_row + col * grad_col
    g = tl.load(grad_at, mask=inside, other=0.0).to(tl.float32) * sign
    m_at, v_at = exp_avg + row * m_row + col * m_col, exp_avg_sq + row * v_row + col * v_col
    m = tl.load(m_at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
    value_at = values + (row if HAS_ROWS else target) * value_row + col * value_col
    w = tl.load(value_at, mask=inside, other=0.0).to(tl.float32)

    m += (g - m) * complement1
    v = v * beta2 + g * g * complement2
    w = w * shrink - size * (m / (tl.sqrt(v) / root + eps))

    counter = target * n + col
    _store(m_at, m, inside, counter, moment_key, 1, STOCHASTIC_MOMENTS)
    _store(v_at, v, inside, counter, moment_key, 2, STOCHASTIC_MOMENTS)
    w = _store(value_at, w, inside, counter, key, 0, STOCHASTIC)
    if HAS_ROWS:
        w = w.to(tl.float32)
        tl.store(weight + target * weight_row + col * weight_col, narrowed(w, weight.dtype.element_ty), mask=inside)


_compact_adamw = kernel_op(
    "compact_adamw_(Tensor(a!)[] weights, Tensor[] indices, Tensor(b!)[] rows, Tensor[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor[] ages, int dim, float step, float step_size, float beta1, float beta2, "
    "float eps, float shrink, bool maximize, bool gather_grad, int[] keys, int[] moment_keys) -> ()",
    twin=_twin,
    launch=_launch,
    fake=lambda *_: None,
)
