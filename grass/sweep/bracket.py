"""A search for the two best learning rates on a grid of powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping

Point = tuple[int, int]
"""How many times each rate is doubled."""

LEVEL = 0.002
"""Nats below which losses count as equal: a search does not follow a valley that is flat."""

FURTHEST = 10
"""Doublings or halvings after which a search gives up."""

START: list[Point] = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]


def next_points(losses: Mapping[Point, float]) -> list[Point]:
    """The points to try next: the neighbours of the best one so far that have not been tried.

    None are left when the best point is inside its bracket: half and twice of each rate are worse, with the other rate
    as it is, or better by less than :data:`LEVEL`. While no point has a finite loss, both rates are halved.

    Args:
        losses: by point; infinite where training diverged or was stopped.

    Raises:
        ValueError: the search has left the grid, because the loss falls ever further or is never finite.
    """
    if not losses:
        return START
    best = best_point(losses)
    if not math.isfinite(losses[best]):
        near = [(min(point) - 1,) * 2 for point in [min(losses)]]
    else:
        near = [(best[0] + a, best[1] + b) for a, b in START[1:]]
    if any(max(map(abs, point)) > FURTHEST for point in near):
        raise ValueError(
            f"No best rates within {FURTHEST} halvings or doublings of the first ones: start from other rates"
        )
    return [point for point in near if point not in losses]


def best_point(losses: Mapping[Point, float]) -> Point:
    """Of the points whose losses are within :data:`LEVEL` of the least, the one that is nearest to the start."""
    least = min(losses.values())
    level = [point for point, loss in losses.items() if loss <= least + LEVEL]
    return min(level, key=lambda point: (sum(map(abs, point)), losses[point]))
