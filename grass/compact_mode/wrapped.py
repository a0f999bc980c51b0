"""A conversion that comes too late: DDP has taken note of the parameters that there were, or they are sharded."""

from __future__ import annotations

import gc
from typing import Any

from torch import distributed, nn

from grass.parallel.ddp import wrappers_of
from grass.parallel.shards import TENSOR_PARALLEL, is_sharded, is_tensor_parallel


def check_not_wrapped(model: nn.Module) -> None:
    """Refuse a model that DDP has wrapped, as Lightning does before it calls ``configure_optimizers``.

    Raises:
        RuntimeError: a ``DistributedDataParallel`` alive holds parameters of the model.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    own = [p for p in model.parameters() if p.requires_grad]
    if wrappers_of(own) and gc.collect() is not None and wrappers_of(own):  # a wrapper may only wait for its collection
        raise RuntimeError(
            "Too late to convert: DistributedDataParallel has wrapped this model and would not reduce the gradients of "
            "the active rows. Call grass.compact() before; in Lightning, in the module's __init__ or configure_model"
        )


def check_not_sharded(layers: dict[str, Any]) -> None:
    """Refuse layers whose weights are sharded already, but for those on a grid of ranks.

    Raises:
        TypeError: ``parallelize_module`` has sharded one.
        RuntimeError: ``fully_shard`` has.
    """
    for name, layer in layers.items():
        if is_tensor_parallel(layer):
            raise TypeError(TENSOR_PARALLEL)
        if is_sharded(layer.weight) and not hasattr(layer, "strata"):
            raise RuntimeError(
                f"Too late to convert {name!r}: its weight is sharded. Call grass.compact() before fully_shard"
            )
