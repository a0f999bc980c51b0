"""Compact mode under FSDP2: how ``fully_shard`` is to lay out converted layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Shard

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.refresh_cycle import check_can_be_sharded
from grass.targets import expert_weights


def shard_placement_fn(model: nn.Module) -> Callable[[nn.Parameter], Shard | None]:
    """What ``fully_shard(..., shard_placement_fn=...)`` takes, such that every refresh and update is local to a rank.

    Weights and active rows are sharded along the dimension that is not selected: ``Shard(0)`` for columns (``dim=1``),
    ``Shard(1)`` for rows (``dim=0``), whose width must then divide by the number of ranks. All other parameters are
    left to ``fully_shard``, but for weights of experts ``(E, m, n)`` in dense mode: they are divided for its default,
    ``dim=1``. Every rank has a part of all experts. Call it before the optimizer is built::

        grass.compact(model, rank=128)
        placement = grass.distributed.shard_placement_fn(model)
        for block in model.model.layers:
            fully_shard(block, shard_placement_fn=placement)
        fully_shard(model, shard_placement_fn=placement)
        optimizer = grass.GrassAdamW(model, lr=1e-3)

    Raises:
        ValueError: weights are int8 codes, whose scales belong to whole rows.
    """
    layers = [module for module in model.modules() if isinstance(module, CompactLayer)]
    for layer in layers:
        check_can_be_sharded(layer)
    experts = [module._parameters.get(name) for module in model.modules() for name in expert_weights(module)]

    def placement(parameter: nn.Parameter) -> Shard | None:
        for layer in layers:
            if parameter is layer.active:
                return Shard(1 - layer.dim)
            if parameter is layer.weight:
                return Shard(layer.weight_axis(1 - layer.dim))
        return Shard(1) if any(parameter is weight for weight in experts) else None

    return placement
