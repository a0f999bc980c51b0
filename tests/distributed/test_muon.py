"""``GrassMuon`` on several ranks: replicas under DDP, shards of FSDP2, and its state by distributed checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import grass
from grass.distributed import shard_placement_fn
from tests.compact_mode.networks import Network, train
from tests.distributed.training import assert_close, joint_batches, train_jointly, weights
from tests.distributed.world import run_world

MUON_TOLERANCE: dict[str, float] = {"rtol": 0, "atol": 2e-3}
"""Muon orthogonalises in bfloat16, where another order of sums shows."""


def build(*, sharded: bool = False) -> tuple[nn.Module, grass.GrassMuon]:
    model = Network(torch.float64)
    grass.compact(model, rank=3, explore=3)
    if sharded:
        placement = shard_placement_fn(model)
        for part in (model.up, model.mix, model.down, model):
            fully_shard(part, shard_placement_fn=placement)
    return model, grass.GrassMuon(model, lr=1e-2, update_interval=4, selection="multinomial_norm")


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in weights(model).items()}


def replicated(rank: int) -> dict[str, Tensor]:
    model, optimizer = build()
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches())
    return weights(model)


def sharded(rank: int, path: Path) -> dict[str, Any]:
    """What an uninterrupted run ends with, and what runs that go on from four kinds of checkpoints do."""
    data, (model, optimizer) = joint_batches(), build(sharded=True)
    train_jointly(model, optimizer, data)
    ends = {"uninterrupted": whole(model)}
    stopped, older = build(sharded=True)
    train_jointly(stopped, older, data[:5])
    saved = copy.deepcopy((stopped.state_dict(), older.state_dict()))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = dict(
        zip(("model", "optimizer"), copy.deepcopy(get_state_dict(stopped, older, options=options)), strict=True)
    )
    states = dict(zip(("model", "optimizer"), get_state_dict(stopped, older), strict=True))
    dcp.save(states, checkpoint_id=path)
    for kind in ("state_dict", "get_state_dict", "files", "flattened"):
        model, optimizer = build(sharded=True)
        if kind == "state_dict":
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        else:
            found, how = (flattened, options) if kind == "flattened" else (states, None)
            if kind == "files":
                found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.load(found, checkpoint_id=path)
            parts = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
            set_state_dict(model, optimizer, **parts, options=how)
        train_jointly(model, optimizer, data[5:])
        ends[kind] = whole(model)
    return ends


@pytest.mark.slow
def test_replicas_and_shards_train_as_one_process_and_go_on(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, joint_batches())
    expected = weights(model)
    first, second = run_world(replicated, 2)
    assert_close(first, expected, **MUON_TOLERANCE)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for ends in run_world(sharded, 2, tmp_path):
        uninterrupted = ends.pop("uninterrupted")
        assert_close(uninterrupted, expected, **MUON_TOLERANCE)
        for kind, end in ends.items():
            assert all(torch.equal(value, uninterrupted[name]) for name, value in end.items()), kind
