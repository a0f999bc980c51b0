"""An expert without tokens in the step of a refresh keeps its rows, moments and step counts, whatever the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grass
from grass import GrassAdamW
from tests.experts.models import EXPERTS, Experts, train

RESTING, BUSY = [0, 2], [1, 3]
"""Experts without tokens in step 4 of :func:`tests.experts.models.batch`, where the selection of step 1 is renewed."""


def dense(dim: int, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Experts()
    groups = [
        {"params": [model.up], "experts": True, "dim": dim},
        {"params": [model.down], "experts": True, "dim": 1 - dim},
    ]
    return model, GrassAdamW(groups, rank=3, lr=1e-2, update_interval=4, **options)


def compact(dim: int, explore: Any = 2, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Experts()
    grass.compact(model, rank=3, explore=explore, dim=dim)
    return model, GrassAdamW(model, lr=1e-2, update_interval=5, **options)


def held(optimizer: Any) -> list[dict[str, list[Tensor]]]:
    """Rows, moments and step counts by parameter and expert."""
    every = []
    for state in optimizer.state.values():
        dims = {"indices": 0, "row_steps": 0, "exp_avg": state["dim"], "exp_avg_sq": state["dim"]}
        every.append({key: [part.clone() for part in state[key].chunk(EXPERTS, dim)] for key, dim in dims.items()})
    return every


@pytest.mark.parametrize("explore", [0, 2])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("selection", ["uniform", "top_r", "multinomial_norm"])
@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("build", [dense, compact])
def test_a_refresh_leaves_experts_without_tokens(
    build: Any, policy: str, selection: str, dim: int, explore: int
) -> None:
    model, optimizer = build(dim, state_policy=policy, selection=selection, explore=explore)
    train(model, optimizer, 4)
    before, refreshes = held(optimizer), [state["refreshes"] for state in optimizer.state.values()]
    weights = model.up.detach().clone(), model.down.detach().clone()
    train(model, optimizer, 1, 4)
    assert [state["refreshes"] for state in optimizer.state.values()] == [count + 1 for count in refreshes]
    for old, new in zip(before, held(optimizer), strict=True):
        for key, parts in old.items():
            for expert in RESTING:
                assert torch.equal(new[key][expert], parts[expert]), (key, expert)
    if selection == "uniform":  # the other experts have drawn anew
        assert any(
            not torch.equal(new["indices"][e], old["indices"][e])
            for e in BUSY
            for new, old in [(held(optimizer)[0], before[0])]
        )
    for old, weight in zip(weights, (model.up, model.down), strict=True):
        assert torch.equal(weight[RESTING], old[RESTING])
        assert not torch.equal(weight[BUSY], old[BUSY])


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [dense, compact])
def test_reset_begins_the_others_again(build: Any, moment_dtype: str) -> None:
    """After a refresh, an expert with tokens has the step counts of this one, or of no step."""
    model, optimizer = build(1, state_policy="reset", moment_dtype=moment_dtype)
    train(model, optimizer, 5)
    for state in optimizer.state.values():
        ages = state["row_steps"].view(EXPERTS, -1)
        assert ages[BUSY].unique().tolist() == [1.0 if build is dense else 0.0]
        assert (ages[RESTING] >= 2.0).all()


@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_attached_optimizer_keeps_momentum_of_resting_experts(policy: str) -> None:
    torch.manual_seed(0)
    model = Experts()
    grass.compact(model, rank=3, explore=0)
    rows = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(rows, lr=1e-3, momentum=1.0)
    grass.attach(optimizer, model, update_interval=5, state_policy=policy)
    layers = [layer for layer in model.modules() if hasattr(layer, "chosen")]
    train(model, optimizer, 4)
    before = [
        (layer.selected.view(EXPERTS, -1).clone(), optimizer.state[layer.active]["momentum_buffer"].clone())
        for layer in layers
    ]
    train(model, optimizer, 1, 4)
    for layer, (rows_before, momentum) in zip(layers, before, strict=True):
        now = optimizer.state[layer.active]["momentum_buffer"].chunk(EXPERTS, layer.dim)
        for expert in RESTING:
            assert torch.equal(layer.selected.view(EXPERTS, -1)[expert], rows_before[expert])
            assert torch.equal(now[expert], momentum.chunk(EXPERTS, layer.dim)[expert])
        if policy == "reset":
            assert all(now[expert].count_nonzero() == 0 for expert in BUSY)
