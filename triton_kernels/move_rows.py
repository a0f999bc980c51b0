r"""Move explored rows along their scaled gradient, all by the same length, in one call
(:mod:`grass.selection.exploration`).

For row ``k`` of ``q``, which is row ``sigma_k`` of the weight ``W (m, n)``, with the factors ``phi (n,)`` of
:mod:`move_factors`::

    U_k = phi * g_k
    w_k <- w_k - step_size length U_k / |U_k|            stays where |U_k| is 0
    W[sigma_k] <- w_k

``w`` is a tensor of its own (``rows``, possibly finer than ``W``) or ``W[sigma]``. What is stored in half precision is
rounded stochastically if there is a key (:mod:`random_bits`): bit stream 4 for ``w``, 5 for ``W``; the counter of an
element is its place ``sigma_k n + j`` in the weight.

Floor: ``12 q n`` bytes in float32 on the weight's own rows (gradient and values read, values written), ``16 q n`` with
``rows``; ``6 q n`` for bfloat16 throughout, ``14 q n`` with float32 ``rows`` and gradient over a bfloat16 weight. About
``7 q n`` FLOPs. A program reads the gradient of its rows twice, for the norm and for the move. The second reading comes
from L2 as long as that holds the rows in flight, a few for each multiprocessor; it adds ``q n e`` bytes otherwise.
Columns of a row-major weight take 32 bytes a value where they lie further apart than that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compact_adamw import _rounded, _store
from .dispatch import check_shape, kernel_op
from .language import cdiv, is_column_major, jit, tile, tl
from .layout import gather, scatter_
from .random_bits import Stream, key_words


def move_rows_(
    weight: Tensor,
    indices: Tensor,
    grad: Tensor,
    factors: Tensor,
    length: Tensor,
    *,
    step_size: float,
    dim: int = 0,
    rows: Tensor | None = None,
    norms: Tensor | None = None,
    gather_grad: bool = False,
    key: int | None = None,
) -> None:
    """Move rows (``dim=1``: columns) of ``weight``, and ``rows``, in place.

    Args:
        weight: ``(m, n)``, any strides.
        indices: int64 ``(q,)``, distinct, each in ``[0, m)`` (``dim=1``: ``[0, n)``). Kernels do not check the range.
        grad: the gradient of these rows ``(q, n)`` (``(m, q)``), or with ``gather_grad`` the full one.
        factors: ``phi``, ``(n,)`` (``(m,)``).
        length: of a move with ``step_size=1``; 0-dim.
        step_size: what ``length`` is multiplied by; negative to ascend.
        dim: 0 for rows, 1 for columns.
        rows: the values ``w``, ``(q, n)`` (``(m, q)``), if they are a tensor of their own.
        norms: ``|U_k|``, ``(q,)``, if the rows are sharded and this is a part of each.
        gather_grad: whether ``grad`` is the full gradient.
        key: of stochastic rounding, :func:`random_bits.make_key`; ``None`` rounds to nearest.

    Raises:
        ValueError: ``dim`` is neither 0 nor 1, or shapes do not agree.
    """
    if dim not in (0, 1):
        raise ValueError(f"Invalid {dim=}: must be 0 (rows) or 1 (columns)")
    if dim == 1:
        weight, grad, rows = weight.t(), grad.t(), None if rows is None else rows.t()
    shape = (indices.numel(), weight.shape[1])
    check_shape("grad", grad, tuple(weight.shape) if gather_grad else shape, dim)
    check_shape("factors", factors, shape[1:])
    check_shape("length", length, ())
    if rows is not None:
        check_shape("rows", rows, shape, dim)
    if norms is not None:
        check_shape("norms", norms, shape[:1])
    _move_rows(weight, indices, rows, grad, factors, length, norms, step_size, gather_grad, key)


def _twin(
    weight: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    grad: Tensor,
    factors: Tensor,
    length: Tensor,
    norms: Tensor | None,
    step_size: float,
    gather_grad: bool,
    key: int | None,
) -> None:
    wide = torch.promote_types(factors.dtype, torch.float32)
    most = gather_grad and rows is None and 2 * indices.numel() > weight.shape[0]  # then no row is gathered
    unit = (gather(grad, indices, 0) if gather_grad and not most else grad).to(wide) * factors
    if norms is None:
        every = torch.linalg.vector_norm(unit, dim=1)
        norms = every.index_select(0, indices) if most else every
    sizes = torch.where(norms > 0, step_size * length / norms, 0.0)
    if most:
        sizes = torch.zeros(weight.shape[0], dtype=wide, device=weight.device).index_copy_(0, indices, sizes)
        indices = torch.arange(weight.shape[0], device=weight.device)
    old = (weight if most else gather(weight, indices, 0)) if rows is None else rows
    new = old.to(wide).addcmul_(unit, sizes.unsqueeze(1), value=-1)
    place = torch.arange(weight.shape[1], device=weight.device)
    counter = indices.unsqueeze(1) * weight.shape[1] + place if key is not None else place
    value = _rounded(new, old.dtype, counter, key, Stream.EXPLORED)
    if rows is not None:
        value = _rounded(rows.copy_(value).to(wide), weight.dtype, counter, key, Stream.EXPLORED_WEIGHT)
    if not most:
        scatter_(weight, indices, 0, value)
    elif value is not weight:
        weight.copy_(value)


def _launch(
    weight: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    grad: Tensor,
    factors: Tensor,
    length: Tensor,
    norms: Tensor | None,
    step_size: float,
    gather_grad: bool,
    key: int | None,
) -> None:
    q, n = indices.numel(), weight.shape[1]
    values = weight if rows is None else rows
    transposed = is_column_major(weight)
    block_q, block_n = tile(q, n, transposed, elements=1024, run=64 if transposed else 1024)
    words = *key_words(key or 0, Stream.EXPLORED), key_words(key or 0, Stream.EXPLORED_WEIGHT)[1]
    strides = *weight.stride(), *values.stride(), *grad.stride()
    flags = rows is not None, norms is not None, gather_grad, key is not None
    _move_rows_kernel[(cdiv(q, block_q),)](
        weight, indices, values, grad, factors, length, norms, q, n, *strides, step_size, *words, *flags,
        block_q, block_n,
    )  # fmt: skip


@jit
def _scaled(grad, factors, col, n, there, grad_col):
    """``U`` of a tile: ``grad`` points to the first value of its rows."""
    g = tl.load(grad + col[None, :] * grad_col, mask=there[:, None] & (col < n)[None, :], other=0.0).to(tl.float32)
    return g * tl.load(factors + col, mask=col < n, other=0.0)[None, :]


@jit
def _move_rows_kernel(
    weight, indices, values, grad, factors, length, norms, q, n,
    weight_row, weight_col, value_row, value_col, grad_row, grad_col, step_size, key_low, first_high, second_high,
    HAS_ROWS: tl.constexpr, HAS_NORMS: tl.constexpr, GATHER_GRAD: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    there = row < q
    target = tl.load(indices + row, mask=there, other=0)
    grad_at = grad + ((target if GATHER_GRAD else row) * grad_row)[:, None]
    if HAS_NORMS:
        norm = tl.load(norms + row, mask=there, other=0.0)
    else:
        total = tl.zeros([BLOCK_Q, BLOCK_N], dtype=tl.float32)
        for start in range(0, n, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N).to(tl.int64)
            u = _scaled(grad_at, factors, col, n, there, grad_col)
            total += u * u
        norm = tl.sqrt(tl.sum(total, axis=1))
    size = tl.where(norm > 0, step_size * tl.load(length) / tl.where(norm > 0, norm, 1.0), 0.0)[:, None]
    value_at = values + ((row if HAS_ROWS else target) * value_row)[:, None]
    weight_at = weight + (target * weight_row)[:, None]
    for start in range(0, n, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside, counter = there[:, None] & (col < n)[None, :], target[:, None] * n + col[None, :]
        place = value_at + col[None, :] * value_col
        w = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        w -= size * _scaled(grad_at, factors, col, n, there, grad_col)
        w = _store(place, w, inside, counter, key_low, first_high, STOCHASTIC)
        if HAS_ROWS:
            w = w.to(tl.float32)
            _store(weight_at + col[None, :] * weight_col, w, inside, counter, key_low, second_high, STOCHASTIC)


_move_rows = kernel_op(
    "move_rows_(Tensor(a!) weight, Tensor indices, Tensor(b!)? rows, Tensor grad, Tensor factors, Tensor length, "
    "Tensor? norms, float step_size, bool gather_grad, int? key) -> ()",
    twin=_twin,
    launch=_launch,
    fake=lambda *_: None,
)
