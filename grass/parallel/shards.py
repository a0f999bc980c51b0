"""Sharded weights: parameters are ``DTensor``, the arithmetic uses each rank's local tensor.

FSDP2 and tensor parallelism each shard a weight along one dimension. Where it is the one along which Grass does not
select, every rank has its part of every row (``dim=1``: column) and updates its part of the selected ones. A refresh
only sums squared norms over the shards. Where it is the selected one, each rank selects rows of its own part: a
stratum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grass import kernels
from grass.private_names import is_parallelized, is_traceable_wrapper_subclass


def is_sharded(tensor: Any) -> bool:
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
    "Converted layers do not take parallelize_module, which divides their rows unseen: call it before grass.compact(), "
    "and fully_shard after"
)


def shard_dim(placement: Any) -> int | None:
    """The dimension of a tensor that a placement divides, also in strides (FSDP2 beside tensor parallelism)."""
    return getattr(placement, "dim", None)


def aligned_grad(parameter: Tensor) -> Tensor:
    """The gradient, placed over the ranks as the parameter is."""
    grad, placements = parameter.grad, getattr(parameter, "placements", None)
    assert grad is not None
    if placements is None or grad.placements == placements:  # type: ignore[attr-defined]
        return grad
    aligned: Tensor = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
    return aligned


def check_shards(tensor: Tensor, selected: int, name: str, *, batch: bool = False) -> None:
    """Raise ``ValueError`` if a tensor without strata is sharded along its dimension ``selected``, or has partial sums.

    One rank alone divides nothing. A ``batch`` of experts may not be divided along its first dimension either, because
    every rank selects rows of all of them.
    """
    placements = getattr(tensor, "placements", ())
    ranks = tensor.device_mesh.shape if placements else ()  # type: ignore[attr-defined]
    dims = [shard_dim(p) for p, size in zip(placements, ranks, strict=True) if size > 1 and not p.is_replicate()]
    if any(dim in (None, selected) or (batch and dim == 0) for dim in dims):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} is placed as {placements}, but Grass selects along dimension "
            f"{selected}{' of each expert' if batch else ''}: choose the other dim=, for FSDP2 pass "
            "shard_placement_fn=grass.distributed.shard_placement_fn(model) to fully_shard, or for tensor "
            f"{'or expert ' * batch}parallelism train in compact mode: parallelize_module or parallelize_2d, then "
            "grass.compact(), then fully_shard"
        )


def own_part(tensor: Tensor, over: int) -> Tensor:
    """This rank's part of a ``DTensor`` that dimension ``over`` of its mesh divides; the others shard it as before."""
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, list(tensor.placements)  # type: ignore[attr-defined]
    if mesh.ndim == 1:
        return local(tensor)
    names, sizes = list(mesh.mesh_dim_names), list(tensor.shape)
    del names[over]
    sizes[shard_dim(placements.pop(over)) or 0] //= mesh.shape[over]
    stride = torch.empty(sizes, device="meta").stride()
    whole: dict[str, Any] = {"shape": torch.Size(sizes), "stride": stride}
    part: Tensor = DTensor.from_local(local(tensor), mesh[tuple(names)], placements, run_check=False, **whole)
    return part


def is_tensor_parallel(module: Any) -> bool:
    """Whether ``parallelize_module`` has sharded the weight of a layer."""
    return is_sharded(module._parameters.get("weight")) and is_parallelized(module)


def row_norms(grad: Tensor, dim: int) -> Tensor:
    """Norms of the rows (``dim=1``: columns) of a gradient ``(m, n)``; every rank gets all of them.

    Of experts, ``(E, m, n)``, those of one after another.
    """
    own = local(grad)
    norms = torch.cat([kernels.row_norms(e, dim) for e in own]) if own.ndim > 2 else kernels.row_norms(own, dim)
    return norms if type(grad) is Tensor else summed(norms.square(), grad).sqrt()


def summed(part: Tensor, like: Tensor) -> Tensor:
    """Each rank's partial sum over the entries of ``like``, summed over the ranks that hold shards of it."""
    for mesh_dim, placement in enumerate(getattr(like, "placements", ())):
        if shard_dim(placement) is not None:
            part = part.clone()
            dist.all_reduce(part, group=like.device_mesh.get_group(mesh_dim))  # type: ignore[attr-defined]
    return part
