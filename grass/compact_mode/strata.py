"""Strata: parts of a weight that ranks select rows of by themselves (:mod:`grass.distributed.parallel_2d`)."""

from __future__ import annotations

from typing import Any

import numpy as np

Given = int | float | None
"""``rank`` or ``explore``, as the user gives it."""


def of_stratum(layer: Any, rank: Any, explore: Given, dim: int, weights: str | None) -> tuple[Any, Given]:
    """Rank and explore of each stratum of a layer; a layer without strata is one.

    Raises:
        ValueError: a count that the strata cannot share; another dimension or 8-bit weights.
    """
    strata = getattr(layer, "strata", 1)
    if strata > 1 and dim != 1:
        raise ValueError(f"Invalid {dim=}: layers on a grid of ranks take dim=1")
    if strata > 1 and weights is not None:
        raise ValueError(f"Invalid {weights=}: layers on a grid of ranks take weights=None")
    return share("rank", rank, strata), share("explore", explore, strata)


def share(name: str, value: Given, strata: int) -> Given:
    """The part of a count that each of the strata has; a fraction stays."""
    if strata == 1 or value is None or isinstance(value, (float, np.floating)):
        return value
    if value % strata:
        raise ValueError(f"Invalid {name}={value}: must be a multiple of the {strata} strata of ranks, or a fraction")
    return value // strata
