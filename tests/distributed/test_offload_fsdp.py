"""Offload under FSDP2: each rank's shards are stepped on its host, and train as resident ones do, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grass import GrassAdamW, Offload, compact, param_groups
from grass.distributed import shard_placement_fn
from tests.compact_mode.networks import Network, selections
from tests.distributed.test_fsdp import sharded, weights_of
from tests.distributed.training import assert_close, joint_batches, train_jointly
from tests.distributed.world import attempt_world, run_world

RULES: list[dict[str, Any]] = [
    {"selection": "uniform", "state_policy": "keep", "dim": 1, "explore": 4},
    {"selection": "uniform", "state_policy": "keep", "dim": 0, "explore": 2, "decay": "all", "weight_decay": 0.1},
    {"selection": "multinomial_norm", "state_policy": "bank", "dim": 1},
    {"selection": "top_r", "state_policy": "reset", "dim": 1, "active": torch.float32},
]
SLOW = Offload(_bytes_per_second=2e5)


def everything(model: nn.Module, optimizer: GrassAdamW) -> dict[str, Tensor]:
    """Weights and state, whole, on every rank."""
    found = weights_of(model.state_dict())
    for i, state in optimizer.state_dict()["state"].items():
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        found.update({f"{key} of {i}": value for key, value in weights_of(tensors).items()})
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], case: object) -> None:
    assert ours.keys() == theirs.keys(), case
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), (case, name)


def every_rule(rank: int) -> None:
    for rule in RULES:
        for layout in ({}, {"reshard_after_forward": False}):
            found = []
            for offload in (None, SLOW):
                model, optimizer = sharded(torch.float32, **rule, **layout, offload=offload)
                train_jointly(model, optimizer, joint_batches(dtype=torch.float32))
                found.append((everything(model, optimizer), selections(model)))
            assert found[0][1] == found[1][1], rule
            assert_same(found[1][0], found[0][0], (rule, layout))


@pytest.mark.slow
def test_equals_the_resident_optimizer() -> None:
    run_world(every_rule, 2)


def hybrid(rank: int) -> None:
    found = []
    for offload in (None, SLOW):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, optimizer = sharded(torch.float32, mesh=mesh, explore=4, offload=offload)
        train_jointly(model, optimizer, joint_batches(dtype=torch.float32))
        found.append(everything(model, optimizer))
    assert_same(found[1], found[0], "hybrid")


@pytest.mark.slow
def test_hybrid_sharding() -> None:
    run_world(hybrid, 4)


class Deep(nn.Module):
    """Blocks in a list, between two layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def deep(wrapped: str, mode: str, offload: Offload | None) -> tuple[Deep, GrassAdamW]:
    torch.manual_seed(0)
    model = Deep()
    if mode == "compact":
        compact(model, rank=4)
    placement = shard_placement_fn(model) if mode == "compact" else lambda p: None
    parts = {"blocks": [*model.blocks], "layers": [layer for block in model.blocks for layer in (block[0], block[2])]}
    parts["prefetched"] = parts["blocks"]
    for part in [*parts.get(wrapped, []), model]:
        fully_shard(part, shard_placement_fn=placement)
    if wrapped == "prefetched":
        model.set_modules_to_forward_prefetch(list(model.blocks))
    options: dict[str, Any] = {"lr": 1e-2, "offload": offload, "update_interval": 3}
    if mode == "compact":
        return model, GrassAdamW(model, **options)
    groups = model.parameters() if mode == "plain" else param_groups(model, rank=4, dim=1)
    return model, GrassAdamW(groups, explore=0, **options)


def gated(rank: int, wrapped: str) -> list[int]:
    """How many parameters were on their way after each step."""
    batches, waiting = torch.randn(7, 4, 8, generator=torch.Generator().manual_seed(1)), []
    for mode in ("plain", "compact"):
        found = []
        for offload in (None, SLOW):
            model, optimizer = deep(wrapped, mode, offload)
            for x in batches:
                model(x).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if optimizer.offload is not None:
                    waiting.append(len(optimizer.offload._pending))
                optimizer.zero_grad()
            found.append(everything(model, optimizer))
        assert_same(found[1], found[0], (wrapped, mode))
    return waiting


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["root", "blocks", "layers", "prefetched"])
def test_the_next_forward_waits_before_shards_are_gathered(wrapped: str) -> None:
    for waiting in run_world(gated, 2, wrapped):
        assert max(waiting[:7]) == len(list(Deep().parameters()))  # all of them overlap with the forward
        assert max(waiting[7:]) > 0


def checkpointed(rank: int, folder: Path, offload: Offload | None) -> tuple[dict[str, Tensor], list[list[int]]]:
    model, optimizer = sharded(torch.float32, **RULES[0], offload=offload)
    data = joint_batches(dtype=torch.float32)
    train_jointly(model, optimizer, data[:5])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train_jointly(model, optimizer, data[5:])
    return everything(model, optimizer), selections(model)


def continued(rank: int, folder: Path, offload: Offload | None) -> tuple[dict[str, Tensor], list[list[int]]]:
    model, optimizer = sharded(torch.float32, seed=1, **RULES[0], offload=offload)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train_jointly(model, optimizer, joint_batches(dtype=torch.float32)[5:])
    return everything(model, optimizer), selections(model)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [None, SLOW], ids=["resident", "offloaded"])
def test_checkpoint_across_world_sizes_and_homes(saved: Offload | None, tmp_path: Path) -> None:
    expected, rows = run_world(checkpointed, 2, tmp_path, saved)[0]
    for size in (1, 2, 4):
        for ours, chosen in run_world(continued, size, tmp_path, SLOW if saved is None else None):
            assert chosen == rows
            if size == 2:
                assert_same(ours, expected, size)
            else:
                assert_close(ours, expected, rtol=1e-4, atol=1e-5)  # float32, another order of summation


def visiting(rank: int) -> None:
    model = Network(torch.float32)
    fully_shard(model)
    optimizer = GrassAdamW(model.parameters(), offload=Offload(fraction=0.5))
    train_jointly(model, optimizer, joint_batches(1, torch.float32))


def test_sharded_state_does_not_visit_the_device() -> None:
    for outcome in attempt_world(visiting, 2):
        assert outcome.error is not None
        assert "Invalid fraction=0.5 for sharded parameters" in outcome.error
