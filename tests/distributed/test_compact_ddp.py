"""Compact mode under plain DDP: the sketch is summed over ranks, so they choose what one process would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import grass
from tests.compact_mode.networks import compact_layers, converted, selections, train
from tests.distributed.training import assert_close, assert_trained_alike, joint_batches, train_jointly, weights
from tests.distributed.world import run_world

RULES: list[dict[str, Any]] = [
    {"selection": "top_r", "state_policy": "reset", "dim": 0},
    {"selection": "top_r", "state_policy": "keep", "dim": 1, "refresh": "exact"},
    {"selection": "multinomial_norm", "state_policy": "bank", "dim": 1},
    {"selection": "multinomial_norm_sq", "state_policy": "keep", "dim": 0, "fused": True, "sketch_size": 4},
    {"selection": "uniform", "state_policy": "reset", "dim": 1},
    {"selection": "uniform", "state_policy": "keep", "dim": 1, "explore": 4},
    {"selection": "multinomial_norm", "state_policy": "bank", "dim": 0, "explore": 0.25},
]


def every_rule(rank: int) -> list[tuple[dict[str, Tensor], list[list[int]]]]:
    trained = []
    for rule in RULES:
        for micro in (1, 2):
            model, optimizer = converted(torch.float64, **rule)
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=micro == 2)
            train_jointly(ddp, optimizer, joint_batches(), micro)
            trained.append((weights(model), selections(model)))
    return trained


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_joint_training_equals_one_process(size: int) -> None:
    ranks = run_world(every_rule, size)
    expected = []
    for rule in RULES:
        model, optimizer = converted(torch.float64, **rule)
        train(model, optimizer, joint_batches())
        expected += [(weights(model), selections(model))] * 2
    for trained in ranks:
        assert_trained_alike(trained, expected)


def attached(rank: int) -> dict[str, Tensor]:
    model = attach_sgd()
    train_jointly(DistributedDataParallel(model[0]), model[1], joint_batches())
    return weights(model[0])


def attach_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = converted(torch.float64)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)
    grass.attach(optimizer, model, update_interval=4, state_policy="keep")
    return model, optimizer


def test_another_optimizer_attached() -> None:
    model, optimizer = attach_sgd()
    train(model, optimizer, joint_batches())
    for ours in run_world(attached, 2):
        assert_close(ours, weights(model))


def hooked(rank: int) -> list[dict[str, Tensor]]:
    """Under torch's communication hooks: PowerSGD at the rank of the gradients, and bfloat16 on the wire."""
    trained = []
    for compressed in (False, True):
        model, optimizer = converted(torch.float64, selection="top_r", explore=4)
        ddp = DistributedDataParallel(model)
        if compressed:
            ddp.register_comm_hook(None, fp16_compress_hook)
        else:
            state = PowerSGDState(None, matrix_approximation_rank=64, start_powerSGD_iter=2, min_compression_rate=0)
            ddp.register_comm_hook(state, powerSGD_hook)
        train_jointly(ddp, optimizer, joint_batches())
        trained.append(weights(model))
    return trained


def test_hooks_of_torch() -> None:
    """They see the gradient of the active columns as any other."""
    model, optimizer = converted(torch.float64, selection="top_r", explore=4)
    train(model, optimizer, joint_batches())
    for exact, compressed in run_world(hooked, 2):
        assert_close(exact, weights(model))
        for name, value in weights(model).items():
            torch.testing.assert_close(compressed[name], value, rtol=0.0, atol=1e-2)  # half precision on the wire


def unfrozen(rank: int) -> None:
    """A loop that has frozen a model and unfreezes all of it, before DDP and the optimizer."""
    model, _ = converted()
    model.requires_grad_(False)
    model.requires_grad_(True)
    ddp = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="built while weights of converted layers, as 'up', took gradients"):
        grass.GrassAdamW(model)
    del ddp
    optimizer = grass.GrassAdamW(model)
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(dtype=torch.float32))
    assert all(layer.weight.grad is None for layer in compact_layers(model).values())


def test_weights_that_were_unfrozen_before() -> None:
    run_world(unfrozen, 2)
