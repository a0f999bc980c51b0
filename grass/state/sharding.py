"""State as ``DTensor``, for checkpoints: sharded with its weight, or a bank that ranks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grass.parallel.shards import shard_dim
from grass.state.schema import BANKED_MOMENTS, SHARDED_KEYS, State


def assembled(state: State, like: Tensor, weight_shape: tuple[int, ...], *, batch: bool = False) -> State:
    """The state of a sharded weight ``(m, n)`` with its sharded tensors as ``DTensor``, placed as ``like`` is.

    Args:
        state: of this rank.
        like: the parameter.
        weight_shape: ``(m, n)`` of the whole weight.
        batch: whether ``like`` has the weights of experts one after another, ``(E, ...)``.
    """
    from torch.distributed.tensor import Shard

    rows = list(weight_shape)
    rows[state["dim"]] = state["indices"].numel()
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    if batch:
        placements = [p if (dim := shard_dim(p)) is None else Shard(dim - 1) for p in placements]
    whole = {
        key: _whole(state[key], mesh, placements, weight_shape if key.startswith("bank") else tuple(rows))
        for key in SHARDED_KEYS & state.keys()
    }
    return {**state, **whole}


def assembled_bank(state: State, weight_shape: tuple[int, ...], group: dist.ProcessGroup) -> State:
    """The state of a weight ``(m, n)`` whose bank the ranks share, with the bank as ``DTensor``."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    mesh, dim = DeviceMesh.from_group(group, "cpu"), state["dim"]
    whole = {key: _whole(state[key], mesh, [Shard(dim)], weight_shape) for key in BANKED_MOMENTS}
    return {**state, **whole, "bank_steps": _whole(state["bank_steps"], mesh, [Shard(0)], (weight_shape[dim],))}


def _whole(part: Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    part = part.contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
