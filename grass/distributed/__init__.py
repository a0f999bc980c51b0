"""Grass on several processes: what ``torch.distributed`` does not do by itself."""

from grass.distributed.fsdp import shard_placement_fn
from grass.distributed.parallel_2d import parallelize_2d
from grass.distributed.reduced_allreduce import ReducedAllreduceState, reduced_allreduce_hook
from grass.distributed.uneven import agree, deal

__all__ = [
    "ReducedAllreduceState",
    "agree",
    "deal",
    "parallelize_2d",
    "reduced_allreduce_hook",
    "shard_placement_fn",
]
