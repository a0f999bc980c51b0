r"""What explored rows move by, from the selected rows: the scaling of each column, the length of each row.

``D (r, n)`` is the AdamW direction of the selected rows, ``G (r, n)`` their gradient, ``t_k`` a row's step count::

    D_k      = M_k / (1 - beta1^t_k) / (sqrt(V_k / (1 - beta2^t_k)) + eps)
    phi_j    = |D[:, j]| / |G[:, j]|             0 where G[:, j] is zero        (n,)
    length_k = |D_k|                                                            (r,)
    mean     = sum_k length_k / r

Floor: ``r n (8 + e)`` bytes with float32 moments (``r n (2 + e)`` with codes of 8 bits) and ``e`` bytes per gradient
value, each read once; about ``15 r n`` FLOPs. ``D`` is never stored. Each program sums a block of columns over a share
of the rows; a second kernel adds the partial sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .arithmetic import StepCoefficients
from .compact_adamw import _correction
from .dispatch import check_shape, kernel_op
from .language import INTERPRETED, cdiv, is_column_major, jit, logarithm, tile, tl
from .layout import gather, is_dense
from .moment_codes import decode_moment, dynamic_map
from .together import batches_of_alike, first_of, located, table_of

PROGRAMS = 4 if INTERPRETED else 512
"""Programs wanted at least for one weight: some four for each of a GPU's hundred-odd multiprocessors."""

AT_ONCE = 2**22
"""Most partial sums of a launch; weights share a launch up to that."""


def move_factors(
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    row_steps: Sequence[Tensor] | float,
    *,
    scales: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    indices: Sequence[Tensor] | None = None,
    dim: int = 0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The scaling ``phi`` and the lengths ``|D_k|`` that :func:`grass.kernels.move_rows_` needs, of several weights.

    Args:
        exp_avgs: ``M`` of each, ``(r, n)`` (``dim=1``: ``(m, r)``), any strides, after this step's update.
        exp_avg_sqs: ``V``, likewise; in codes of its square root.
        grads: the compact gradients of the same shapes; with ``indices`` the full ones.
        row_steps: Adam steps of the rows, the last one included: a number for all, or of each weight float ``(r,)``.
        scales: those of both moments if these are codes (:mod:`grass.kernels.moment_codes`), dense in memory.
        indices: of each int64 ``(r,)``, rows (``dim=1``: columns) of the full gradient. Kernels do not check the range.
        dim: 0 for rows, 1 for columns.
        betas: decay rates of the moments.
        eps: added to the denominator.

    Returns:
        Of each weight ``phi (n,)`` (``dim=1``: ``(m,)``), ``(r,)`` and the mean of these, 0-dim; float32, of float64
        moments float64. Weights that are alike share a launch; the bits are those of a call for each.

    Raises:
        ValueError: ``dim`` is neither 0 nor 1, shapes do not agree, or codes are not dense.
    """
    if dim not in (0, 1):
        raise ValueError(f"Invalid {dim=}: must be 0 (rows) or 1 (columns)")
    ages, step = (row_steps, 0.0) if isinstance(row_steps, Sequence) else (None, float(row_steps))
    columns = exp_avgs, exp_avg_sqs, *(scales or (None, None)), grads, indices, ages
    moves: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for *alike, places in batches_of_alike(columns, (range(len(exp_avgs)),)):
        _check(alike, dim)
        factors, lengths, means = _move_factors(*alike, dim, step, *betas, eps)
        moves.update(zip(places, zip(factors.unbind(), lengths.unbind(), means.unbind(), strict=True), strict=True))
    return [moves[i] for i in range(len(exp_avgs))]


def _check(columns: list[list[Tensor]], dim: int) -> None:
    exp_avg, exp_avg_sq, scale, _, grad, indices, _ = first_of(columns, dim)
    shape = (grad.shape[0] if indices is None else indices.numel(), grad.shape[1])
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_shape(name, moment, shape, dim)
        if scale is not None and not is_dense(moment):
            raise ValueError(f"{name} has codes with strides {moment.stride()}, must be dense")


def _twin(
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    grads: list[Tensor],
    indices: list[Tensor],
    ages: list[Tensor],
    dim: int,
    step: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    every = []
    matrices = (map(Tensor.t, column) if dim == 1 else column for column in (exp_avgs, exp_avg_sqs, grads))
    columns = *matrices, *(column or repeat(None) for column in (exp_avg_scales, exp_avg_sq_scales, indices, ages))
    for exp_avg, exp_avg_sq, grad, first_scale, second_scale, chosen, age in zip(*columns, strict=False):
        if first_scale is not None and second_scale is not None:
            exp_avg = decode_moment(exp_avg, first_scale, signed=True)
            exp_avg_sq = decode_moment(exp_avg_sq, second_scale, signed=False).square_()
        wide = torch.promote_types(exp_avg.dtype, torch.float32)
        c = StepCoefficients.at(step if age is None else age.to(wide), 1.0, (beta1, beta2)).along(0)
        root = exp_avg_sq.to(wide).sqrt().div_(c.denominator).add_(eps).div_(c.step_size)
        direction = torch.div(exp_avg.to(wide), root, out=root)
        compact = grad if chosen is None else gather(grad, chosen, 0)
        across = torch.linalg.vector_norm(compact, dim=0, dtype=wide)
        factors = torch.where(across > 0, torch.linalg.vector_norm(direction, dim=0) / across, 0.0)
        lengths = torch.linalg.vector_norm(direction, dim=1)
        every.append((factors, lengths, lengths.mean()))
    factors, lengths, means = (torch.stack(column) for column in zip(*every, strict=True))
    return factors, lengths, means


def _launch(
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    grads: list[Tensor],
    indices: list[Tensor],
    ages: list[Tensor],
    dim: int,
    step: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, grads, indices, ages
    exp_avg, exp_avg_sq, first_scale, second_scale, grad, chosen, age = first_of(tensors, dim)
    count, (r, n) = len(exp_avgs), exp_avg.shape
    block_r, block_n = tile(r, n, is_column_major(exp_avg), elements=1024, run=256)
    wanted = max(1, min(cdiv(PROGRAMS, cdiv(n, block_n)), cdiv(r, 4 * block_r)))
    share = cdiv(cdiv(r, wanted), block_r) * block_r
    shares, across = cdiv(r, share), cdiv(n, block_n)
    most = max(1, AT_ONCE // (shares * 2 * n + across * r))
    if count > most:
        parts = (slice(start, start + most) for start in range(0, count, most))
        numbers: tuple[Any, ...] = dim, step, beta1, beta2, eps
        every = [_launch(*(*(column[part] for column in tensors), *numbers)) for part in parts]
        factors, lengths, means = (torch.cat(results) for results in zip(*every, strict=True))
        return factors, lengths, means
    table, aligned = table_of(tensors)
    sizes = shares * 2 * n, across * r, n, r, 1
    columns, rows, factors, lengths, means = (
        torch.empty(count, size, dtype=torch.float32, device=grad.device) for size in sizes
    )
    logs = logarithm(beta1), logarithm(beta2)
    strides = *exp_avg.stride(), *exp_avg_sq.stride(), *grad.stride()
    coded = first_scale is not None
    levels = [dynamic_map(signed, str(grad.device)) if coded else None for signed in (True, False)]
    moments = exp_avg, exp_avg_sq, first_scale, second_scale, *levels
    _move_factors_kernel[across, shares, count](
        columns, rows, *moments, grad, chosen, age, table, r, n, share, *strides, step, *logs, eps,
        coded, chosen is not None, age is not None, aligned, block_r, block_n,
    )  # fmt: skip
    grid = cdiv(max(r, n), 256), 3, count
    _finish_kernel[grid](factors, lengths, means, columns, rows, r, n, shares, across, 256)
    return factors, lengths, means.view(count)


@jit
def _moment(moment, scale, levels, place, inside, CODED: tl.constexpr, NOTHING: tl.constexpr):
    """Values of a moment at places in memory; a code's is that of its level times the scale of its block."""
    if CODED:
        code = tl.load(moment + place, mask=inside, other=NOTHING).to(tl.int32)
        return tl.load(levels + code) * tl.load(scale + place // 256, mask=inside, other=0.0)
    return tl.load(moment + place, mask=inside, other=0.0).to(tl.float32)


@jit
def _move_factors_kernel(
    columns, rows, exp_avg, exp_avg_sq, first_scale, second_scale, signed_levels, levels, grad, indices, ages,
    table, r, n, share, m_row, m_col, v_row, v_col, grad_row, grad_col, step, log_beta1, log_beta2, eps,
    CODED: tl.constexpr, GATHER_GRAD: tl.constexpr, PER_ROW: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    exp_avg, exp_avg_sq = located(exp_avg, table, 0, ALIGNED), located(exp_avg_sq, table, 1, ALIGNED)
    grad = located(grad, table, 4, ALIGNED)
    if CODED:
        first_scale, second_scale = located(first_scale, table, 2, ALIGNED), located(second_scale, table, 3, ALIGNED)
    if GATHER_GRAD:
        indices = located(indices, table, 5, ALIGNED)
    if PER_ROW:
        ages = located(ages, table, 6, ALIGNED)
    matrix = tl.program_id(2).to(tl.int64)
    columns += matrix * tl.num_programs(1) * 2 * n
    rows += matrix * tl.num_programs(0) * r
    col = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1).to(tl.int64) * share
    end = tl.minimum(begin + share, r)
    moved = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    graded = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R).to(tl.int64)
        there = row < end
        source = tl.load(indices + row, mask=there, other=0) if GATHER_GRAD else row
        steps = tl.load(ages + row, mask=there, other=1.0) if PER_ROW else tl.full([BLOCK_R], 0.0, tl.float32) + step
        size = _correction(steps, log_beta1)[:, None]
        root = tl.sqrt(_correction(steps, log_beta2))[:, None]
        inside = there[:, None] & (col < n)[None, :]
        m_at, v_at = row[:, None] * m_row + col[None, :] * m_col, row[:, None] * v_row + col[None, :] * v_col
        m = _moment(exp_avg, first_scale, signed_levels, m_at, inside, CODED, 127)
        v = _moment(exp_avg_sq, second_scale, levels, v_at, inside, CODED, 0)
        v = tl.where(inside, v * v if CODED else v, 1.0)
        g = tl.load(grad + source[:, None] * grad_row + col[None, :] * grad_col, mask=inside, other=0.0).to(tl.float32)
        d = m / size / (tl.sqrt(v) / root + eps)
        moved += d * d
        graded += g * g
        tl.store(rows + tl.program_id(0).to(tl.int64) * r + row, tl.sum(d * d, axis=1), mask=there)
    place = columns + tl.program_id(1).to(tl.int64) * 2 * n + col
    tl.store(place, tl.sum(moved, axis=0), mask=col < n)
    tl.store(place + n, tl.sum(graded, axis=0), mask=col < n)


@jit
def _finish_kernel(factors, lengths, means, columns, rows, r, n, shares, across, BLOCK: tl.constexpr):
    matrix = tl.program_id(2).to(tl.int64)
    columns += matrix * shares * 2 * n
    rows += matrix * across * r
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    moved = tl.zeros([BLOCK], dtype=tl.float32)
    if tl.program_id(1) == 0:
        graded = tl.zeros([BLOCK], dtype=tl.float32)
        for part in range(0, shares):
            place = columns + i + 2 * n * tl.full([], part, tl.int64)
            moved += tl.load(place, mask=i < n, other=0.0)
            graded += tl.load(place + n, mask=i < n, other=0.0)
        phi = tl.where(graded > 0, tl.sqrt(moved / tl.where(graded > 0, graded, 1.0)), 0.0)
        tl.store(factors + matrix * n + i, phi, mask=i < n)
    elif tl.program_id(1) == 1:
        tl.store(lengths + matrix * r + i, _length(rows, i, r, across, BLOCK), mask=i < r)
    elif tl.program_id(0) == 0:
        for start in range(0, r, BLOCK):
            moved += _length(rows, start + tl.arange(0, BLOCK).to(tl.int64), r, across, BLOCK)
        tl.store(means + matrix, tl.sum(moved, axis=0) / r)


@jit
def _length(rows, i, r, across, BLOCK: tl.constexpr):
    """The length of the directions of rows ``i``, of the sums of their squares in several parts; 0 from ``r`` on."""
    square = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(0, across):
        square += tl.load(rows + i + r * tl.full([], part, tl.int64), mask=i < r, other=0.0)
    return tl.sqrt(square)


def _fake(
    exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], first: object, second: object, grads: object, indices: object,
    ages: object, dim: int, *numbers: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(exp_avgs[0].dtype, torch.float32)
    count, sizes = len(exp_avgs), (exp_avgs[0].shape[1 - dim], exp_avgs[0].shape[dim])
    factors, lengths = (exp_avgs[0].new_empty(count, size, dtype=wide) for size in sizes)
    return factors, lengths, exp_avgs[0].new_empty(count, dtype=wide)


_move_factors = kernel_op(
    "move_factors(Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] exp_avg_scales, Tensor[] exp_avg_sq_scales, "
    "Tensor[] grads, Tensor[] indices, Tensor[] ages, int dim, float step, float beta1, float beta2, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    twin=_twin,
    launch=_launch,
    fake=_fake,
    types=frozenset({torch.uint8}),
)
