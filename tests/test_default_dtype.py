"""What a step computes does not depend on ``torch.set_default_dtype``: every tensor is created in a stated dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import PAPER, GrassAdamW
from tests.compact_mode.networks import Network, batches, train
from tests.experts.models import Experts
from tests.experts.models import train as train_experts


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def default(request: Any) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def dense(model: nn.Module, **options: Any) -> GrassAdamW:
    return GrassAdamW(grass.param_groups(model, rank=3), **{"lr": 1e-2, "update_interval": 2, **options})


def compact(model: nn.Module, dtype: Any = None, **options: Any) -> GrassAdamW:
    grass.compact(model, rank=3, dtype=dtype)
    return GrassAdamW(model, **{"lr": 1e-2, "update_interval": 2, **options})


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    states = optimizer.state_dict()["state"]
    held = [(f"{i}.{key}", value) for i, s in states.items() for key, value in s.items() if isinstance(value, Tensor)]
    return [*model.state_dict().items(), *held]


def assert_same(results: list[list[tuple[str, Tensor]]]) -> None:
    for (name, ours), (_, theirs) in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "replacement": {"replacement": True, "selection": "multinomial_norm", "stochastic_rounding": False},
    "paper": {**PAPER, "explore": None, "update_interval": 2},
    "bank": {"state_policy": "bank", "selection": "multinomial_norm"},
    "8-bit moments": {"moment_dtype": "8bit"},
    "bf16 moments, decay of all": {"moment_dtype": "bfloat16", "decay": "all"},
    "exact": {"selection": "top_r", "refresh": "exact", "fused": False},
    "offload": {"offload": "cpu"},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("build", [dense, compact])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["of float32", "of bfloat16"])
def test_layers(dtype: torch.dtype, build: Any, options: dict[str, Any], default: torch.dtype) -> None:
    if options.get("replacement") and build is compact:
        pytest.skip("compact mode draws without replacement")
    results = []
    options = {"stochastic_rounding": dtype == torch.bfloat16, **options}
    for used in (torch.float32, default):
        torch.set_default_dtype(torch.float32)
        model, data = Network(dtype), batches(5, dtype=dtype)
        torch.set_default_dtype(used)
        optimizer = build(model, **options)
        train(model, optimizer, data)
        results.append(contents(model, optimizer))
    assert_same(results)


@pytest.mark.parametrize("offload", [None, grass.Offload(masters=True), grass.Offload(masters=True, fraction=1.0)])
@pytest.mark.parametrize("active", [None, torch.float32], ids=["bf16", "fp32 over bf16"])
def test_precisions(active: Any, offload: Any, default: torch.dtype) -> None:
    results = []
    for used in (torch.float32, default):
        torch.set_default_dtype(torch.float32)
        model, data = Network(torch.bfloat16), batches(5, dtype=torch.bfloat16)
        torch.set_default_dtype(used)
        optimizer = compact(model, active, offload=offload)
        train(model, optimizer, data)
        results.append(contents(model, optimizer))
    assert_same(results)


@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("explore", [0, 2])
@pytest.mark.parametrize("build", [dense, compact])
def test_experts(build: Any, explore: int, policy: str, default: torch.dtype) -> None:
    results = []
    for used in (torch.float32, default):
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        model = Experts()
        torch.set_default_dtype(used)
        if build is compact:
            grass.compact(model, rank=3, explore=explore)
            optimizer = GrassAdamW(model, lr=1e-2, update_interval=2, state_policy=policy)
        else:
            optimizer = dense(model, state_policy=policy, explore=explore)
        train_experts(model, optimizer, 5)
        results.append(contents(model, optimizer))
    assert_same(results)
