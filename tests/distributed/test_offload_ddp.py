"""Offload under DDP trains as the resident optimizer does, to the bit, and so do all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grass import GrassAdamW, Offload
from grass.distributed import ReducedAllreduceState, reduced_allreduce_hook
from tests.compact_mode.networks import converted, selections
from tests.distributed.training import OPTIONS, dense, joint_batches, train_jointly, weights
from tests.distributed.world import run_world

RULES: list[dict[str, Any]] = [
    {"build": converted, "selection": "multinomial_norm", "state_policy": "bank", "dim": 1},
    {"build": converted, "selection": "top_r", "state_policy": "keep", "refresh": "exact", "dim": 0, "explore": 4},
    {"build": dense, "selection": "multinomial_norm", "state_policy": "bank", "dim": 1},
    {"build": dense, "selection": "top_r", "state_policy": "keep", "explore": 1.0},
]
SLOW = Offload(_bytes_per_second=1e6)


def built(offload: Offload | None, **rule: Any) -> tuple[nn.Module, GrassAdamW]:
    options = {**OPTIONS, "update_interval": 3, **rule, "offload": offload}
    return options.pop("build")(torch.float32, **options)


def trained(offload: Offload | None, hook: bool = False, micro: int = 1, **rule: Any) -> dict[str, Tensor]:
    model, optimizer = built(offload, **rule)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=micro == 2)
    if hook:
        ddp.register_comm_hook(ReducedAllreduceState(optimizer), reduced_allreduce_hook)
    train_jointly(ddp, optimizer, joint_batches(8, torch.float32), micro)
    found = weights(model)
    found.update((f"rows {i}", torch.tensor(rows)) for i, rows in enumerate(selections(model)))
    states = optimizer.state_dict()["state"]
    found.update(
        (f"{key} of {i}", getattr(value, "full_tensor", value.clone)())
        for i, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    )
    return found


def compared(rank: int, rules: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    results = []
    for rule in rules:
        resident, offloaded = trained(None, **rule), trained(SLOW, **rule)
        assert resident.keys() == offloaded.keys(), rule
        for name, value in resident.items():
            assert torch.equal(offloaded[name], value), (rule, name)
        results.append(offloaded)
    return results


def assert_alike(ranks: list[list[dict[str, Tensor]]]) -> None:
    for ours, theirs in zip(*ranks, strict=True):
        for name, value in ours.items():
            assert torch.equal(theirs[name], value), name


@pytest.mark.slow
def test_equals_the_resident_optimizer() -> None:
    assert_alike(run_world(compared, 2, [{**rule, "micro": micro} for rule in RULES for micro in (1, 2)]))


def test_with_the_reduced_all_reduce() -> None:
    hooked = [{**rule, "hook": True} for rule in RULES if rule["build"] is dense and rule.get("explore") is None]
    assert_alike(run_world(compared, 2, hooked))


@pytest.mark.slow
def test_with_a_bank_divided_among_the_ranks() -> None:
    shared = [{**rule, "shard_bank": True} for rule in RULES if rule["state_policy"] == "bank"]
    assert_alike(run_world(compared, 2, shared))
