"""Strata: parts of a weight that ranks select rows of by themselves.

A grid of ranks has them (:mod:`grass.distributed.parallel_2d`), and tensor parallelism along the selected dimension
(:mod:`grass.compact_mode.tensor_parallel`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from grass.parallel.shards import is_tensor_parallel, shard_dim

Given = int | float | None
"""``rank`` or ``explore``, as the user gives it."""


def strata_of(layer: Any, dim: int) -> int:
    """How many strata a layer has, converted or to be converted, if rows (``dim=1``: columns) are selected."""
    if is_tensor_parallel(layer):
        divided: bool = shard_dim(layer.weight.placements[-1]) == dim
        return int(layer.weight.device_mesh.shape[-1]) if divided else 1
    return int(getattr(layer, "strata", 1))


def of_stratum(layer: Any, rank: Any, explore: Given, dim: int, weights: str | None) -> tuple[Any, Given]:
    """Rank and explore of each stratum of a layer; a layer without strata is one.

    Raises:
        ValueError: a count that the strata cannot share; on a grid, another dimension; 8-bit weights.
    """
    strata, parallel = strata_of(layer, dim), is_tensor_parallel(layer)
    if strata > 1 and dim != 1 and not parallel:
        raise ValueError(f"Invalid {dim=}: layers on a grid of ranks take dim=1")
    if (strata > 1 or parallel) and weights is not None:
        raise ValueError(f"Invalid {weights=}: layers that tensor parallelism or a grid divides take weights=None")
    return share("rank", rank, strata), share("explore", explore, strata)


def share(name: str, value: Given, strata: int) -> Given:
    """The part of a count that each of the strata has; a fraction stays."""
    if strata == 1 or value is None or isinstance(value, (float, np.floating)):
        return value
    if value % strata:
        raise ValueError(f"Invalid {name}={value}: must be a multiple of the {strata} strata of ranks, or a fraction")
    return value // strata
