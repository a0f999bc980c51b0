"""A conversion that comes too late: DDP has taken note of the parameters that there were, or they are sharded."""

from __future__ import annotations

import gc
from typing import Any

from torch import distributed, nn

from grass.parallel.ddp import wrappers_of
from grass.parallel.shards import is_sharded, is_tensor_parallel, shard_dim


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
    """Refuse layers whose weights are sharded already, but for those whose class knows how.

    Raises:
        ValueError: ``parallelize_module`` has placed one in a way that is not supported.
        RuntimeError: ``fully_shard`` has sharded one.
    """
    for name, layer in layers.items():
        if is_tensor_parallel(layer) and layer.weight.device_mesh.ndim == 1:
            _check_split(name, layer.weight)
        elif is_sharded(layer.weight) and getattr(layer, "divided_by", None) is None:
            raise RuntimeError(
                f"Too late to convert {name!r}: its weight is sharded, as {layer.weight.placements}. Call "
                "grass.compact() before fully_shard; tensor parallelism has to be torch's parallelize_module, not "
                "transformers' tp_plan"
            )


def _check_split(name: str, weight: Any) -> None:
    """Refuse a weight that ranks do not have equal parts of."""
    (placement,), (ranks,) = weight.placements, weight.device_mesh.shape
    dim = shard_dim(placement)
    if dim is None:
        raise ValueError(
            f"The weight of {name!r} is placed as {placement!r}: compact mode takes Shard(0), as of ColwiseParallel, "
            "or Shard(1), as of RowwiseParallel; leave other layers out by exclude="
        )
    if weight.shape[dim] % ranks:
        raise ValueError(
            f"The weight of {name!r} of shape {tuple(weight.shape)} is placed as {placement!r}, which {ranks} ranks do "
            f"not share evenly: compact mode needs a multiple of {ranks}; leave the layer out by exclude="
        )
