r"""Explored rows: in every step some of the rows without Adam state move along their gradient.

Of the ``n`` rows of a weight (``dim=1``: columns), ``r`` are selected and have Adam state. In every step ``q`` of the
others are drawn at random. With ``D`` the AdamW direction of the selected rows and ``G`` the gradient::

    phi_j = |D[:, j]| / |G[sigma, j]|                      AdamW's scaling of column j, measured on the selected rows
    U_i   = phi * G_i                                      of an explored row i
    W_i  <- W_i - lr scale reach U_i / |U_i| mean_k |D_k|

An explored row moves ``reach = min((n - r) / q, 6 sqrt(q / n))`` times as far as the selected rows do on average,
because it rests in other steps; at least as far as they do. With ``q = n - r`` every row moves and ``reach`` is 1. It
decays ``(n - r) / q`` times as much as a selected row, so that over many steps every row decays as under AdamW. No
state is kept. Scaling the rest of the gradient like its low-rank part is Fira's idea (Chen et al., 2024, arXiv
2410.01623, section 4); setting each row's length, and drawing the rows, are ours. ``docs/quality.md`` has the
measurements.

The draw follows from seed, parameter and step: ranks agree on it without communication, and a resumed run repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grass.kernels import make_key, row_norms
from grass.kernels.random_bits import Stream, random_bits_of_keys
from grass.parallel.shards import summed

LIMIT = 6.0
"""The factor of ``sqrt(q / n)`` in :func:`reach`, measured with a quarter and an eighth explored."""

DRAWN_AT_ONCE = 1 << 20
"""Rows that random bits are drawn for at a time: 8 MB of them."""


def resolve_explore(explore: int | float | None, rank: int, size: int) -> int:
    """Rows to explore in each step.

    Args:
        explore: a count, a fraction of ``size``, or ``None`` for as many as are selected. A fraction is cut to the
            ``size - rank`` rows that are not selected, so that ``1.0`` means all of them.
        rank: selected rows.
        size: all rows.
    """
    if isinstance(explore, (float, np.floating)):
        return min(max(round(float(explore) * size), int(explore > 0)), size - rank)
    return min(rank, size - rank) if explore is None else int(explore)


def reach(size: int, rank: int, count: int) -> float:
    """How many times as far as the selected rows an explored row moves: ``min((n - r) / q, 6 sqrt(q / n))``.

    A row is explored in ``q / (n - r)`` of the steps, so over many steps it moves as far as if it moved in each. The
    noise of a move grows with its length, and moves of few rows trained better when they were shorter
    (``docs/quality.md``); hence the limit, which is 3 where a quarter is explored, and never below 1.
    """
    return min(turns(size, rank, count), max(1.0, LIMIT * math.sqrt(count / size)))


def turns(size: int, rank: int, count: int) -> float:
    """``(n - r) / q``: in one of so many steps a row that is not selected is explored, on average."""
    return (size - rank) / count


def auto_scale(size: int, rank: int, count: int) -> float:
    """``n / (r + q)``: what ``scale="auto"`` multiplies AdamW's learning rate by; 1 if every row moves in each step.

    A row moves in ``(r + q) / n`` of the steps on average. The best rate was near AdamW's times this factor for all
    fractions of the columns that were tried (``docs/quality.md``). Without explored rows it was not, so the factor is 1
    there. SMET divides its rate by the density of its gradients too.
    """
    return size / (rank + count) if count else 1.0


def gradient_scale(size: int, rank: int, count: int) -> float:
    """``sqrt((n - r) / q)``, by which the gradient of explored rows is multiplied for gradient clipping.

    The squared norm of selected and explored rows then has the whole gradient's as its expectation. The length of the
    move is set, so the factor does not change it.
    """
    return math.sqrt(turns(size, rank, count))


def draw_explored(
    selected: Tensor, size: int, count: int, seed: int, parameter: int, step: int, experts: int = 1
) -> Tensor:
    """Draw ``count`` of the rows that are not ``selected``, uniformly without replacement.

    Drawn are the rows with the largest random bits (:func:`grass.kernels.random_bits`), which differ between all rows
    of one draw. ``draw.cpp`` draws the same ones.

    Args:
        selected: int64 ``(r,)``, distinct, on any device.
        size: all rows.
        count: at most ``size - r``.
        seed: of the optimizer.
        parameter: the parameter's place among all groups.
        step: steps that this parameter has taken.
        experts: matrices that the rows belong to, one after another; equally many are drawn of each.

    Returns:
        int64 ``(count,)``, ascending, on the device of ``selected``.
    """
    return draw_explored_of_each([selected], size, count, [(seed, parameter, step)], experts)[0]


def draw_explored_of_each(
    selected: Sequence[Tensor], size: int, count: int, keys: Sequence[tuple[int, int, int]], experts: int = 1
) -> list[Tensor]:
    """:func:`draw_explored` for several weights of one size and rank, a few operations for all: a GPU waits for less.

    Args:
        selected: of each weight.
        size: of every weight.
        count: of every weight.
        keys: seed, place and step of each.
        experts: of every weight.
    """
    if len(keys) > 1 and len(keys) * size > DRAWN_AT_ONCE:
        half = len(keys) // 2
        parts = (selected[:half], keys[:half]), (selected[half:], keys[half:])
        return [rows for own, of in parts for rows in draw_explored_of_each(own, size, count, of, experts)]
    rows = torch.arange(size, device=selected[0].device)
    bits: Tensor = random_bits_of_keys(rows, [draw_key(*key) for key in keys], Stream.DRAW)
    taken = torch.stack(list(selected)) + first_rows(len(keys), len(keys) * size, bits.device)
    bits.view(-1).index_fill_(0, taken.flatten(), -1)
    of_each = bits.view(len(keys), experts, -1).topk(count // experts).indices.sort().values
    return list((of_each + first_rows(experts, size, bits.device)).flatten(1))


def first_rows(experts: int, size: int, device: torch.device) -> Tensor:
    """int64 ``(experts, 1)``: the first row of each expert where ``size`` rows belong to all of them."""
    return torch.arange(0, size, size // experts, device=device).unsqueeze(1)


def draw_key(seed: int, parameter: int, step: int) -> int:
    """The key of the random bits of :func:`draw_explored`."""
    key: int = make_key(seed, parameter, step)
    return key


def explored_directions(
    direction: Tensor, grad: Tensor, explored_grad: Tensor, dim: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The directions ``U`` of explored rows, and the factors that give them the selected rows' mean length.

    Args:
        direction: ``D (r, n)`` of the selected rows, or ``(m, r)``.
        grad: their gradient, of the same shape.
        explored_grad: the gradient of explored rows, ``(q, n)`` or ``(m, q)``.
        dim: 0 for rows, 1 for columns.
        like: the gradient as it is sharded over the ranks; lengths are summed over them.

    Returns:
        ``U`` and ``mean_k |D_k| / |U_i|``, ``(q,)``, 0 where ``U_i`` is zero.
    """
    phi = _quotients(_norms(direction, 1 - dim), _norms(grad, 1 - dim))
    unit = explored_grad * phi.unsqueeze(dim)
    squares = torch.cat([_norms(unit, dim), _norms(direction, dim)]).square()
    lengths, selected = torch.split(summed(squares, like).sqrt(), [unit.shape[dim], direction.shape[dim]])
    return unit, _quotients(selected.mean(), lengths)


def _norms(matrix: Tensor, dim: int) -> Tensor:
    norms: Tensor = row_norms(matrix, dim)
    return norms


def _quotients(norms: Tensor, by: Tensor) -> Tensor:
    """``norms / by``, and 0 where ``by`` is 0."""
    return torch.where(by > 0, norms / by, 0.0)
