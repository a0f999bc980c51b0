"""Dense mode on weights that are ``DTensor``: sharded by tensor parallelism, or by FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import grass
from grass import GrassAdamW
from tests.compact.networks import Network, batches, loss_of, train
from tests.distributed.training import OPTIONS, assert_close, joint_batches, train_jointly, weights
from tests.distributed.world import run_world

POLICIES: list[dict[str, Any]] = [
    {"selection": "top_r", "state_policy": "reset"},
    {"selection": "multinomial_norm", "state_policy": "bank", "replacement": True},
    {"selection": "multinomial_norm", "state_policy": "keep", "explore": 1.0},
]


def parallel(model: Network) -> Network:
    """``up`` and ``mix`` as a pair, colwise and rowwise; the norm between them works on whole activations."""
    plan = {"mix": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def optimizer_of(model: Network, **options: Any) -> GrassAdamW:
    """Colwise weights (split by rows) select columns, rowwise weights rows."""
    named = dict(model.named_parameters())
    groups = [{"params": [named.pop("mix.weight")], "dim": 1}, {"params": [named.pop("down.weight")], "dim": 0}]
    return GrassAdamW([*groups, {"params": list(named.values()), "rank": None}], rank=3, **{**OPTIONS, **options})


def whole(model: Network) -> dict[str, Tensor]:
    return {
        name: getattr(value, "full_tensor", lambda v=value: v)().clone() for name, value in model.state_dict().items()
    }


def tensor_parallel(rank: int) -> list[tuple[dict[str, Tensor], bool]]:
    """Every rank trains on the whole batch; also through a state dict in the middle."""
    trained = []
    for policy in POLICIES:
        model = parallel(Network(torch.float64))
        optimizer = optimizer_of(model, **policy)
        train(model, optimizer, joint_batches()[:5])
        resumed = optimizer_of(model, **policy)
        resumed.load_state_dict(optimizer.state_dict())
        train(model, resumed, joint_batches()[5:])
        trained.append((whole(model), type(model.mix.weight.data).__name__ == "DTensor"))
    return trained


def test_sharded_weights_train_as_whole_ones() -> None:
    ranks = run_world(tensor_parallel, 2)
    for number, policy in enumerate(POLICIES):
        model = Network(torch.float64)
        train(model, optimizer_of(model, **policy), joint_batches())
        for trained in ranks:
            ours, sharded = trained[number]
            assert sharded
            assert_close(ours, weights(model))


def fsdp_dense(rank: int) -> dict[str, Tensor]:
    model = Network(torch.float64)
    fully_shard(model)
    train_jointly(model, optimizer_fsdp(model), joint_batches())
    return whole(model)


def optimizer_fsdp(model: Network) -> GrassAdamW:
    return GrassAdamW(grass.param_groups(model, 3, dim=1), **OPTIONS)


def test_dense_mode_under_fsdp2() -> None:
    model = Network(torch.float64)
    train(model, optimizer_fsdp(model), joint_batches())
    for ours in run_world(fsdp_dense, 2):
        assert_close(ours, weights(model))


def refused(rank: int) -> list[str]:
    """Selection along the sharded dimension; compact mode on sharded weights."""
    errors = []
    model = Network()
    fully_shard(model)
    with pytest.raises(ValueError, match="Grass selects along dimension 0") as error:
        train_jointly(model, GrassAdamW(grass.param_groups(model, 3, dim=0)), joint_batches(1, torch.float32))
    errors.append(str(error.value))
    model = Network()
    grass.compact(model, rank=3, explore=0)
    with pytest.raises(TypeError, match="Tensor-parallel") as error:
        loss_of(parallel(model), batches(1)[0]).backward()
    return [*errors, str(error.value)]


def test_what_is_refused() -> None:
    for errors in run_world(refused, 2):
        assert len(errors) == 2
