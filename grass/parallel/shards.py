"""Sharded weights: parameters are ``DTensor``, the arithmetic uses each rank's local tensor.

FSDP2 and tensor parallelism shard a weight along one dimension. Grass needs it to be the dimension along which it does
not select: every rank then has its part of every row (``dim=1``: column) and updates its part of the selected ones. A
refresh only sums squared norms over the shards.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from grass import kernels


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a ``DTensor``."""
    return hasattr(tensor, "to_local")


def is_wrapper(tensor: Any) -> bool:
    """Whether this is no ``DTensor`` but another tensor that holds tensors, as quantised ones of torchao."""
    return not is_sharded(tensor) and is_traceable_wrapper_subclass(tensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a ``DTensor``; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


TENSOR_PARALLEL = (
    "Compact mode does not support weights that parallelize_module has sharded yet: use dense mode (without "
    "grass.compact()), grass.distributed.parallelize_2d, or FSDP2 alone"
)


def aligned_grad(parameter: Tensor) -> Tensor:
    """The gradient, placed over the ranks as the parameter is."""
    grad, placements = parameter.grad, getattr(parameter, "placements", None)
    assert grad is not None
    if placements is None or grad.placements == placements:  # type: ignore[attr-defined]
        return grad
    aligned: Tensor = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
    return aligned


def check_shards(tensor: Tensor, selected: int, name: str) -> None:
    """Check that a tensor is not sharded along its dimension ``selected``.

    Raises:
        ValueError: it is, or it is sharded over more than one dimension of a mesh.
    """
    placements = getattr(tensor, "placements", ())
    shards = [p for p in placements if not p.is_replicate()]
    if len(shards) > 1:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} is sharded over two dimensions of a mesh, as {placements}, which "
            "Grass does not support yet: use FSDP2 or tensor parallelism alone, or pass rank=None. Weights of "
            "grass.distributed.parallelize_2d train after grass.compact()"
        )
    if any(not p.is_shard() or p.is_shard(selected) for p in shards):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} is placed as {placements}, but Grass selects along dimension "
            f"{selected}: choose the other dim=, or for FSDP2 pass "
            "shard_placement_fn=grass.distributed.shard_placement_fn(model) to fully_shard"
        )


def is_tensor_parallel(module: Any) -> bool:
    """Whether ``parallelize_module`` has sharded the weight of a layer."""
    return is_sharded(module.weight) and getattr(module, "_distribute_module_applied", False)


def row_norms(grad: Tensor, dim: int) -> Tensor:
    """Norms of the rows (``dim=1``: columns) of a gradient ``(m, n)``; every rank gets all of them."""
    norms: Tensor = kernels.row_norms(local(grad), dim)
    return norms if type(grad) is Tensor else summed(norms.square(), grad).sqrt()


def summed(part: Tensor, like: Tensor) -> Tensor:
    """Each rank's partial sum over the entries of ``like``, summed over the ranks that hold shards of it."""
    for mesh_dim, placement in enumerate(getattr(like, "placements", ())):
        if placement.is_shard():
            part = part.clone()
            dist.all_reduce(part, group=like.device_mesh.get_group(mesh_dim))  # type: ignore[attr-defined]
    return part
