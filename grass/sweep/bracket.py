"""A search for the two best learning rates on a grid of powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping

Point = tuple[int, int]
"""How many times each rate is doubled."""

FURTHEST = 10
"""Doublings or halvings after which a search gives up."""

START: list[Point] = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


def next_points(losses: Mapping[Point, float]) -> list[Point]:
    """The points to try next: the neighbours of the best one so far that have not been tried.

    None are left when the best point is inside its bracket: half and twice of each rate are worse, with the other rate
    as it is. While no point has a finite loss, both rates are halved.

    Args:
        losses: by point; infinite where training diverged or was stopped.

    Raises:
        ValueError: the search has left the grid, because the loss falls ever further or is never finite.
    """
    if not losses:
        return START
    best = min(losses, key=lambda point: (losses[point], sum(map(abs, point))))
    if not math.isfinite(losses[best]):
        near = [(min(point) - 1,) * 2 for point in [min(losses)]]
    else:
        near = [(best[0] + a, best[1] + b) for a, b in START[1:]]
    if any(max(map(abs, point)) > FURTHEST for point in near):
        raise ValueError(
            f"No best rates within {FURTHEST} halvings or doublings of the first ones: start from other rates"
        )
    return [point for point in near if point not in losses]
