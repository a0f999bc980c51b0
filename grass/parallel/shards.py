"""Weights and state of which each rank holds a part: ``DTensor`` in parameters and checkpoints, local tensors within.

FSDP2 and tensor parallelism shard a weight along one dimension. Grass wants it to be the one along which it does not
select: every rank then has its part of every row (``dim=1``: column), updates those selected where they are, and only
the squared norms are summed over the shards at a refresh.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grass import kernels

SHARDED_KEYS = ("exp_avg", "exp_avg_sq", "bank_exp_avg", "bank_exp_avg_sq")
"""State that is laid out over the ranks as its weight is; the rest is the same on all."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a ``DTensor``, of which this process holds a part."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part: of a ``DTensor`` the shard, of any other tensor all of it."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def aligned_grad(parameter: Tensor) -> Tensor:
    """The gradient, placed over the ranks as the parameter is."""
    grad, placements = parameter.grad, getattr(parameter, "placements", None)
    assert grad is not None
    if placements is None or grad.placements == placements:  # type: ignore[attr-defined]
        return grad
    aligned: Tensor = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
    return aligned


def check_shards(tensor: Tensor, selected: int, name: str) -> None:
    """See that a tensor is not sharded along its dimension ``selected``, nor otherwise divided.

    Raises:
        ValueError: it is.
    """
    placements = getattr(tensor, "placements", ())
    if not all(p.is_replicate() or (p.is_shard() and not p.is_shard(selected)) for p in placements):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} is placed as {placements}, but Grass selects along dimension "
            f"{selected}: choose the other dim=, or for FSDP2 pass "
            "shard_placement_fn=grass.distributed.shard_placement_fn(model) to fully_shard"
        )


def row_norms(grad: Tensor, dim: int) -> Tensor:
    """Norms of the rows (``dim=1``: columns) of a gradient ``(m, n)``, whole on every rank."""
    norms: Tensor = kernels.row_norms(local(grad), dim)
    return norms if type(grad) is Tensor else summed(norms.square(), grad).sqrt()


def summed(part: Tensor, like: Tensor) -> Tensor:
    """What each rank has of a sum over the entries of ``like``, summed over those ranks that have parts of it."""
    for mesh_dim, placement in enumerate(getattr(like, "placements", ())):
        if placement.is_shard():
            part = part.clone()
            dist.all_reduce(part, group=like.device_mesh.get_group(mesh_dim))  # type: ignore[attr-defined]
    return part


def assembled(state: dict[str, Any], like: Tensor, weight_shape: tuple[int, ...]) -> dict[str, Any]:
    """State of a weight ``(m, n)`` with its sharded tensors as ``DTensor`` of the whole, placed as ``like`` is."""
    rows = list(weight_shape)
    rows[state["dim"]] = state["indices"].numel()
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    whole = {
        key: _whole(state[key], mesh, placements, weight_shape if key.startswith("bank") else tuple(rows))
        for key in SHARDED_KEYS & state.keys()
    }
    return {**state, **whole}


def assembled_bank(state: dict[str, Any], weight_shape: tuple[int, ...], group: dist.ProcessGroup) -> dict[str, Any]:
    """State of a weight ``(m, n)``, the same on all ranks but for the bank, with that as ``DTensor`` of the whole."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    mesh, dim = DeviceMesh.from_group(group, "cpu"), state["dim"]
    whole = {key: _whole(state[key], mesh, [Shard(dim)], weight_shape) for key in ("bank_exp_avg", "bank_exp_avg_sq")}
    return {**state, **whole, "bank_steps": _whole(state["bank_steps"], mesh, [Shard(0)], (weight_shape[dim],))}


def _whole(part: Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    part = part.contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
