"""A search for the best learning rates on a grid of powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping

Point = tuple[int, ...]
"""How many times each rate is doubled."""

LEVEL = 0.002
"""Nats below which losses count as equal: a search does not follow a valley that is flat."""

FURTHEST = 10
"""Doublings or halvings after which a search gives up."""


def next_points(losses: Mapping[Point, float], rates: int = 2, level: float = LEVEL) -> list[Point]:
    """The points to try next: the neighbours of the best one so far that have not been tried.

    None are left when the best point is inside its bracket: half and twice of each rate are worse, with the other rate
    as it is, or better by less than ``level``. While no point has a finite loss, all rates are halved.

    Args:
        losses: by point; infinite where training diverged or was stopped.
        rates: how many are searched.
        level: nats below which losses count as equal.

    Raises:
        ValueError: the search has left the grid, because the loss falls ever further or is never finite.
    """
    if not losses:
        start = (0,) * rates
        return [start, *_neighbours(start)]
    best = best_point(losses, level)
    near = _neighbours(best) if math.isfinite(losses[best]) else [(min(min(losses)) - 1,) * rates]
    if any(max(map(abs, point)) > FURTHEST for point in near):
        raise ValueError(
            f"No best rates within {FURTHEST} halvings or doublings of the first ones: start from other rates"
        )
    return [point for point in near if point not in losses]


def best_point(losses: Mapping[Point, float], level: float = LEVEL) -> Point:
    """The point nearest to the start whose loss is within ``level`` of the least."""
    least = min(losses.values())
    lowest = [point for point, loss in losses.items() if loss <= least + level]
    return min(lowest, key=lambda point: (sum(map(abs, point)), losses[point]))


def _neighbours(point: Point) -> list[Point]:
    """The points at which one rate is half or twice as large."""
    return [(*point[:i], point[i] + by, *point[i + 1 :]) for i in range(len(point)) for by in (-1, 1)]
