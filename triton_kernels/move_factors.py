r"""What explored rows move by, from the selected rows: the scaling of each column, the length of each row.

``D (r, n)`` is the AdamW direction of the selected rows, ``G (r, n)`` their gradient, ``t_k`` a row's step count::

    D_k      = M_k / (1 - beta1^t_k) / (sqrt(V_k / (1 - beta2^t_k)) + eps)
    phi_j    = |D[:, j]| / |G[:, j]|             0 where G[:, j] is zero        (n,)
    length_k = |D_k|                                                            (r,)

Floor: ``r n (8 + e)`` bytes with float32 moments (``r n (2 + e)`` with codes of 8 bits) and ``e`` bytes per gradient
value, each read once; about ``15 r n`` FLOPs. ``D`` is never stored. Each program sums a block of columns over a share
of the rows; a second kernel adds the partial sums in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arithmetic import StepCoefficients
from .compact_adamw import _correction
from .dispatch import check_shape, kernel_op
from .language import INTERPRETED, cdiv, is_column_major, jit, logarithm, tile, tl
from .layout import gather, is_dense
from .moment_codes import decode_moment, dynamic_map

PROGRAMS = 4 if INTERPRETED else 512
"""Programs wanted at least: some four for each of a GPU's hundred-odd multiprocessors."""


def move_factors(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    row_steps: Tensor | float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    indices: Tensor | None = None,
    dim: int = 0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """The scaling ``phi`` and the lengths ``|D_k|`` that :func:`grass.kernels.move_rows_` needs.

    Args:
        exp_avg: ``M``, ``(r, n)`` (``dim=1``: ``(m, r)``), any strides, after this step's update.
        exp_avg_sq: ``V``, likewise; in codes of its square root.
        grad: the compact gradient of the same shape; with ``indices`` the full one.
        row_steps: Adam steps of the rows, the last one included: a number, or float ``(r,)``.
        scales: those of both moments if these are codes (:mod:`grass.kernels.moment_codes`), dense in memory.
        indices: int64 ``(r,)``, rows (``dim=1``: columns) of the full gradient. Kernels do not check the range.
        dim: 0 for rows, 1 for columns.
        betas: decay rates of the moments.
        eps: added to the denominator.

    Returns:
        ``phi (n,)`` (``dim=1``: ``(m,)``) and ``(r,)``; float32, of float64 moments float64.

    Raises:
        ValueError: ``dim`` is neither 0 nor 1, shapes do not agree, or codes are not dense.
    """
    if dim not in (0, 1):
        raise ValueError(f"Invalid {dim=}: must be 0 (rows) or 1 (columns)")
    if dim == 1:
        exp_avg, exp_avg_sq, grad = exp_avg.t(), exp_avg_sq.t(), grad.t()
    shape = (grad.shape[0] if indices is None else indices.numel(), grad.shape[1])
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_shape(name, moment, shape, dim)
        if scales is not None and not is_dense(moment):
            raise ValueError(f"{name} has codes with strides {moment.stride()}, must be dense")
    ages, step = (row_steps, 0.0) if isinstance(row_steps, Tensor) else (None, float(row_steps))
    moments = exp_avg, exp_avg_sq, *(scales or (None, None))
    factors, lengths = _move_factors(*moments, grad, indices, ages, step, *betas, eps)
    return factors, lengths


def _twin(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    grad: Tensor,
    indices: Tensor | None,
    ages: Tensor | None,
    step: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        exp_avg = decode_moment(exp_avg, exp_avg_scale, signed=True)
        exp_avg_sq = decode_moment(exp_avg_sq, exp_avg_sq_scale, signed=False).square_()
    wide = torch.promote_types(exp_avg.dtype, torch.float32)
    c = StepCoefficients.at(step if ages is None else ages.to(wide), 1.0, (beta1, beta2)).along(0)
    root = exp_avg_sq.to(wide).sqrt().div_(c.denominator).add_(eps).div_(c.step_size)
    direction = torch.div(exp_avg.to(wide), root, out=root)
    compact = grad if indices is None else gather(grad, indices, 0)
    across = torch.linalg.vector_norm(compact, dim=0, dtype=wide)
    factors = torch.where(across > 0, torch.linalg.vector_norm(direction, dim=0) / across, 0.0)
    return factors, torch.linalg.vector_norm(direction, dim=1)


def _launch(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    grad: Tensor,
    indices: Tensor | None,
    ages: Tensor | None,
    step: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    r, n = exp_avg.shape
    transposed = is_column_major(exp_avg)
    block_r, block_n = tile(r, n, transposed, elements=1024, run=256)
    wanted = max(1, min(cdiv(PROGRAMS, cdiv(n, block_n)), cdiv(r, 4 * block_r)))
    share = cdiv(cdiv(r, wanted), block_r) * block_r
    shares, across = cdiv(r, share), cdiv(n, block_n)
    columns, rows, factors, lengths = (
        torch.empty(size, dtype=torch.float32, device=grad.device) for size in (shares * 2 * n, across * r, n, r)
    )
    logs = logarithm(beta1), logarithm(beta2)
    strides = *exp_avg.stride(), *exp_avg_sq.stride(), *grad.stride()
    coded = exp_avg_scale is not None
    levels = [dynamic_map(signed, str(grad.device)) if coded else None for signed in (True, False)]
    moments = exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, *levels
    _move_factors_kernel[across, shares](
        columns, rows, *moments, grad, indices, ages, r, n, share, *strides, step, *logs, eps,
        coded, indices is not None, ages is not None, block_r, block_n,
    )  # fmt: skip
    _finish_kernel[cdiv(max(r, n), 256), 2](factors, lengths, columns, rows, r, n, shares, across, 256)
    return factors, lengths


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
    r, n, share, m_row, m_col, v_row, v_col, grad_row, grad_col, step, log_beta1, log_beta2, eps,
    CODED: tl.constexpr, GATHER_GRAD: tl.constexpr, PER_ROW: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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
def _finish_kernel(factors, lengths, columns, rows, r, n, shares, across, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    moved = tl.zeros([BLOCK], dtype=tl.float32)
    if tl.program_id(1) == 0:
        graded = tl.zeros([BLOCK], dtype=tl.float32)
        for part in range(0, shares):
            place = columns + i + 2 * n * tl.full([], part, tl.int64)
            moved += tl.load(place, mask=i < n, other=0.0)
            graded += tl.load(place + n, mask=i < n, other=0.0)
        phi = tl.where(graded > 0, tl.sqrt(moved / tl.where(graded > 0, graded, 1.0)), 0.0)
        tl.store(factors + i, phi, mask=i < n)
    else:
        for part in range(0, across):
            moved += tl.load(rows + i + r * tl.full([], part, tl.int64), mask=i < r, other=0.0)
        tl.store(lengths + i, tl.sqrt(moved), mask=i < r)


def _fake(exp_avg: Tensor, exp_avg_sq: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(exp_avg.dtype, torch.float32)
    return exp_avg.new_empty(exp_avg.shape[1], dtype=wide), exp_avg.new_empty(exp_avg.shape[0], dtype=wide)


_move_factors = kernel_op(
    "move_factors(Tensor exp_avg, Tensor exp_avg_sq, Tensor? exp_avg_scale, Tensor? exp_avg_sq_scale, Tensor grad, "
    "Tensor? indices, Tensor? ages, float step, float beta1, float beta2, float eps) -> (Tensor, Tensor)",
    twin=_twin,
    launch=_launch,
    fake=_fake,
    types=frozenset({torch.uint8}),
)
