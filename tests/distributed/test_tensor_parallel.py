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
from tests.compact_mode.networks import Network, batches, loss_of, train
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


def refused(rank: int) -> None:
    """Compact mode on sharded weights, before and after the conversion."""
    model = Network()
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"Too late to convert 'up'.*before fully_shard"):
        grass.compact(model, rank=3)
    for style in (ColwiseParallel(), RowwiseParallel()):
        model = Network()
        grass.compact(model, rank=3)
        earlier = GrassAdamW(model)
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"mix": style})
        with pytest.raises(TypeError, match=r"parallelize_module.*call it before grass\.compact"):
            GrassAdamW(model)
        with pytest.raises(TypeError, match=r"parallelize_module.*call it before grass\.compact"):
            loss_of(model, batches(1)[0])
        del earlier


def test_what_is_refused() -> None:
    run_world(refused, 2)


def on_a_mesh(rank: int) -> dict[str, Tensor]:
    """FSDP2 over one dimension of a mesh, tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    plan = {"mix": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Network(torch.float64), mesh["parts"], plan)
    fully_shard(model, mesh=mesh["shards"])
    with pytest.raises(ValueError, match=r"is placed as .* but Grass selects along dimension 0"):
        GrassAdamW([model.mix.weight], rank=4, dim=0)
    optimizer = optimizer_on_a_mesh(model)
    for inputs, targets in joint_batches():
        optimizer.zero_grad()
        half = slice(12 * mesh.get_local_rank("shards"), 12 * mesh.get_local_rank("shards") + 12)
        loss_of(model, (inputs[half], targets[half])).backward()
        optimizer.step()
    return whole(model)


def optimizer_on_a_mesh(model: Network) -> GrassAdamW:
    """Columns of ``mix``, whose rows both dimensions of the mesh divide; the rest at full rank."""
    others = [p for name, p in model.named_parameters() if name != "mix.weight"]
    groups = [{"params": [model.mix.weight], "dim": 1}, {"params": others, "rank": None}]
    return GrassAdamW(groups, rank=3, **{**OPTIONS, "selection": "top_r", "explore": 1.0})


@pytest.mark.slow
def test_fsdp2_beside_tensor_parallelism() -> None:
    model = Network(torch.float64)
    train(model, optimizer_on_a_mesh(model), joint_batches())
    for ours in run_world(on_a_mesh, 4):
        assert_close(ours, weights(model))
