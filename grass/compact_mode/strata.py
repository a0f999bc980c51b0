"""Strata: parts of a weight that ranks select rows of by themselves.

Tensor parallelism along the selected dimension has them (:mod:`grass.compact_mode.tensor_parallel`), and so does expert
parallelism, of whole experts (:mod:`grass.compact_mode.expert_parallel`). A class of linear layers that is divided
otherwise says so by attributes: ``divided_by``, what divides it, for messages; ``strata``, how many there are;
``selected_dims``, the ``dim`` that it takes.
"""

from __future__ import annotations

from typing import Any

from grass.options import Count, share
from grass.parallel.shards import is_tensor_parallel, shard_dim

TENSOR_PARALLELISM = "tensor parallelism"
"""What :func:`divider_of` calls it."""


def divider_of(layer: Any) -> str | None:
    """What divides a layer among ranks, converted or to be converted; ``None`` if nothing does."""
    return TENSOR_PARALLELISM if is_tensor_parallel(layer) else getattr(layer, "divided_by", None)


def strata_of(layer: Any, dim: int) -> int:
    """How many strata a layer has, converted or to be converted, if rows (``dim=1``: columns) are selected."""
    if is_tensor_parallel(layer):
        divided: bool = shard_dim(layer.weight.placements[-1]) == dim
        return int(layer.weight.device_mesh.shape[-1]) if divided else 1
    return int(getattr(layer, "strata", 1))


def of_stratum(layer: Any, rank: Any, explore: Count, dim: int, weights: str | None) -> tuple[Any, Count]:
    """Rank and explore of each stratum of a layer; a layer without strata is one.

    Raises:
        ValueError: a count that the strata cannot share; for a divided layer, another dimension, or 8-bit weights.
    """
    strata, by = strata_of(layer, dim), divider_of(layer)
    if dim not in getattr(layer, "selected_dims", (0, 1)):
        raise ValueError(f"Invalid {dim=}: layers that {by} divides take dim={layer.selected_dims[0]}")
    if by is not None and weights is not None:
        raise ValueError(f"Invalid {weights=}: layers that {by} divides take weights=None")
    parts = sharers(layer, strata)
    return share("rank", rank, parts), share("explore", explore, parts)


def sharers(layer: Any, strata: int) -> int:
    """How many strata share ``rank`` and ``explore``: one of experts has these numbers of each expert."""
    return 1 if getattr(layer, "is_batch", False) else strata
