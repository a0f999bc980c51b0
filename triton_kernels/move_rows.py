r"""Move explored rows along their scaled gradient, all by the same length, in one call
(:mod:`grass.selection.exploration`).

For row ``k`` of ``q``, which is row ``sigma_k`` of the weight ``W (m, n)``, with the factors ``phi (n,)`` of
:mod:`move_factors`::

    U_k = phi * g_k
    w_k <- shrink w_k - step_size length U_k / |U_k|     no move where |U_k| is 0
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

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from .compact_adamw import _rounded, _store
from .dispatch import check_shape, kernel_op
from .language import cdiv, is_column_major, jit, tile, tl
from .layout import gather, scatter_
from .random_bits import Stream
from .together import batches_of_alike, first_of, from_table, located, table_of


def move_rows_(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    lengths: Sequence[Tensor],
    *,
    step_size: float,
    shrink: float = 1.0,
    dim: int = 0,
    rows: Sequence[Tensor] | None = None,
    norms: Sequence[Tensor] | None = None,
    gather_grad: bool = False,
    keys: Sequence[int] | None = None,
) -> None:
    """Move rows (``dim=1``: columns) of each weight, and ``rows``, in place.

    Weights that are alike share a launch; the bits of each are those of a call for it alone.

    Args:
        weights: each ``(m, n)``, any strides.
        indices: of each weight int64 ``(q,)``, distinct, in ``[0, m)`` (``dim=1``: ``[0, n)``). Kernels do not check.
        grads: the gradient of these rows ``(q, n)`` (``(m, q)``), or with ``gather_grad`` the full one.
        factors: ``phi`` of each, ``(n,)`` (``(m,)``).
        lengths: of a move with ``step_size=1``; 0-dim.
        step_size: what lengths are multiplied by; negative to ascend.
        shrink: what the rows are multiplied by before they move.
        dim: 0 for rows, 1 for columns.
        rows: the values ``w`` of each, ``(q, n)`` (``(m, q)``), if they are tensors of their own.
        norms: ``|U_k|`` of each, ``(q,)``, if the rows are sharded and this is a part of each.
        gather_grad: whether ``grads`` are the full gradients.
        keys: of stochastic rounding of each, :func:`random_bits.make_key`; ``None`` rounds to nearest.

    Raises:
        ValueError: ``dim`` is neither 0 nor 1, or shapes do not agree.
    """
    if dim not in (0, 1):
        raise ValueError(f"Invalid {dim=}: must be 0 (rows) or 1 (columns)")
    columns = weights, indices, rows, grads, factors, lengths, norms
    for *alike, own_keys in batches_of_alike(columns, (keys,)):
        _check(alike, dim, gather_grad)
        _move_rows(*alike, dim, step_size, shrink, gather_grad, own_keys)


def _check(columns: list[list[Tensor]], dim: int, gather_grad: bool) -> None:
    weight, indices, rows, grad, factors, length, norms = first_of(columns, dim)
    shape = (indices.numel(), weight.shape[1])
    check_shape("grad", grad, tuple(weight.shape) if gather_grad else shape, dim)
    check_shape("factors", factors, shape[1:])
    check_shape("length", length, ())
    if rows is not None:
        check_shape("rows", rows, shape, dim)
    if norms is not None:
        check_shape("norms", norms, shape[:1])


def _twin(
    weights: list[Tensor],
    indices: list[Tensor],
    rows: list[Tensor],
    grads: list[Tensor],
    factors: list[Tensor],
    lengths: list[Tensor],
    norms: list[Tensor],
    dim: int,
    step_size: float,
    shrink: float,
    gather_grad: bool,
    keys: list[int],
) -> None:
    owns = (own.t() for own in rows) if dim == 1 and rows else rows or repeat(None)
    matrices = (map(Tensor.t, column) if dim == 1 else column for column in (weights, grads))
    columns = *matrices, owns, indices, factors, lengths, norms or repeat(None), keys or repeat(None)
    for weight, grad, own, chosen, scaling, length, norm, key in zip(*columns, strict=False):
        _move(weight, grad, own, chosen, scaling, length, norm, key, step_size, shrink, gather_grad)


def _move(
    weight: Tensor,
    grad: Tensor,
    rows: Tensor | None,
    indices: Tensor,
    factors: Tensor,
    length: Tensor,
    norms: Tensor | None,
    key: int | None,
    step_size: float,
    shrink: float,
    gather_grad: bool,
) -> None:
    wide = torch.promote_types(factors.dtype, torch.float32)
    most = gather_grad and rows is None and 2 * indices.numel() > weight.shape[0]  # then no row is gathered
    unit = (gather(grad, indices, 0) if gather_grad and not most else grad).to(wide) * factors
    if norms is None:
        every = torch.linalg.vector_norm(unit, dim=1)
        norms = every.index_select(0, indices) if most else every
    sizes = torch.where(norms > 0, step_size * length / norms, 0.0)
    shrinks = torch.full_like(sizes, shrink)
    if most:
        sizes = sizes.new_zeros(weight.shape[0]).index_copy_(0, indices, sizes)
        shrinks = sizes.new_ones(weight.shape[0]).index_copy_(0, indices, shrinks)
        indices = torch.arange(weight.shape[0], device=weight.device)
    old = (weight if most else gather(weight, indices, 0)) if rows is None else rows
    new = (old.to(wide) * shrinks.unsqueeze(1)).addcmul_(unit, sizes.unsqueeze(1), value=-1)
    place = torch.arange(weight.shape[1], device=weight.device)
    counter = indices.unsqueeze(1) * weight.shape[1] + place if key is not None else place
    value = _rounded(new, old.dtype, counter, key, Stream.EXPLORED)
    if rows is not None:
        value = _rounded(rows.copy_(value).to(wide), weight.dtype, counter, key, Stream.EXPLORED_WEIGHT)
    if most:
        weight.copy_(value)
    else:
        scatter_(weight, indices, 0, value)


def _launch(
    weights: list[Tensor],
    indices: list[Tensor],
    rows: list[Tensor],
    grads: list[Tensor],
    factors: list[Tensor],
    lengths: list[Tensor],
    norms: list[Tensor],
    dim: int,
    step_size: float,
    shrink: float,
    gather_grad: bool,
    keys: list[int],
) -> None:
    columns = weights, indices, rows or weights, grads, factors, lengths, norms
    table, aligned = table_of(columns, (keys,))
    weight, chosen, values, grad, scaling, length, norm = first_of(columns, dim)
    q, n = chosen.numel(), weight.shape[1]
    transposed = is_column_major(weight)
    block_q, block_n = tile(q, n, transposed, elements=1024, run=64 if transposed else 1024)
    strides = *weight.stride(), *values.stride(), *grad.stride()
    flags = bool(rows), bool(norms), gather_grad, bool(keys), aligned
    _move_rows_kernel[cdiv(q, block_q), 1, len(weights)](
        weight, chosen, values, grad, scaling, length, norm, table, q, n, *strides, step_size, shrink, *flags,
        block_q, block_n,
    )  # fmt: skip


@jit
def _scaled(grad, factors, col, n, there, grad_col):
    """``U`` of a tile: ``grad`` points to the first value of its rows."""
    g = tl.load(grad + col[None, :] * grad_col, mask=there[:, None] & (col < n)[None, :], other=0.0).to(tl.float32)
    return g * tl.load(factors + col, mask=col < n, other=0.0)[None, :]


@jit
def _move_rows_kernel(
    weight, indices, values, grad, factors, length, norms, table, q, n,
    weight_row, weight_col, value_row, value_col, grad_row, grad_col, step_size, shrink,
    HAS_ROWS: tl.constexpr, HAS_NORMS: tl.constexpr, GATHER_GRAD: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    weight, indices = located(weight, table, 0, ALIGNED), located(indices, table, 1, ALIGNED)
    values, grad = located(values, table, 2, ALIGNED), located(grad, table, 3, ALIGNED)
    factors, length = located(factors, table, 4, ALIGNED), located(length, table, 5, ALIGNED)
    key = from_table(table, 7)
    row = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    there = row < q
    target = tl.load(indices + row, mask=there, other=0)
    grad_at = grad + ((target if GATHER_GRAD else row) * grad_row)[:, None]
    if HAS_NORMS:
        norm = tl.load(located(norms, table, 6, ALIGNED) + row, mask=there, other=0.0)
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
        w = w * shrink - size * _scaled(grad_at, factors, col, n, there, grad_col)
        w = _store(place, w, inside, counter, key, 4, STOCHASTIC)
        if HAS_ROWS:
            w = w.to(tl.float32)
            _store(weight_at + col[None, :] * weight_col, w, inside, counter, key, 5, STOCHASTIC)


_move_rows = kernel_op(
    "move_rows_(Tensor(a!)[] weights, Tensor[] indices, Tensor(b!)[] rows, Tensor[] grads, Tensor[] factors, "
    "Tensor[] lengths, Tensor[] norms, int dim, float step_size, float shrink, bool gather_grad, int[] keys) -> ()",
    twin=_twin,
    launch=_launch,
    fake=lambda *_: None,
)
