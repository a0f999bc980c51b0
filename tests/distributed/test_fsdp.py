"""Compact mode under FSDP2: shards are updated where they are, and train as one process does."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from grass import GrassAdamW, compact
from grass.distributed import shard_placement_fn
from grass.memory import state_bytes
from tests.compact_mode.networks import Network, converted, loss_of, selections, train
from tests.distributed.training import (
    OPTIONS,
    assert_close,
    assert_trained_alike,
    joint_batches,
    train_jointly,
    weights,
)
from tests.distributed.world import run_world

RULES: list[dict[str, Any]] = [
    {"selection": "top_r", "state_policy": "reset", "dim": 1},
    {"selection": "multinomial_norm", "state_policy": "bank", "dim": 0},
    {"selection": "multinomial_norm", "state_policy": "keep", "dim": 1, "fused": True},
    {"selection": "uniform", "state_policy": "keep", "dim": 1, "explore": 4},
    {"selection": "uniform", "state_policy": "keep", "dim": 0, "explore": 2},
]


def sharded(
    dtype: torch.dtype = torch.float64,
    dim: int = 1,
    seed: int = 0,
    active: Any = None,
    explore: int = 0,
    device: str = "cpu",
    **options: Any,
) -> tuple[Network, GrassAdamW]:
    """A converted network, sharded layer by layer, and its optimizer."""
    keys = ("mesh", "mp_policy", "reshard_after_forward", "offload_policy")
    layout = {key: options.pop(key) for key in keys if key in options}
    model = Network(dtype, seed=seed)
    compact(model, rank=3, explore=explore, dim=dim, dtype=active)
    model.to(device)
    placement = shard_placement_fn(model)
    for layer in (model.up, model.mix, model):
        fully_shard(layer, shard_placement_fn=placement, **layout)
    return model, GrassAdamW(model, **{**OPTIONS, "explore": None, **options})


def gathered(model: Network) -> dict[str, Tensor]:
    """The whole ``state_dict``, on every rank."""
    return weights_of(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


def weights_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}


def every_rule(rank: int) -> list[tuple[dict[str, Tensor], list[list[int]]]]:
    trained = []
    for rule in RULES:
        if rule["dim"] == 0 and dist.get_world_size() == 3:
            continue  # fully_shard shards columns evenly or not at all
        for layout in ({}, {"reshard_after_forward": False}):
            model, optimizer = sharded(**rule, **layout)
            train_jointly(model, optimizer, joint_batches())
            trained.append((weights_of(model.state_dict()), selections(model)))
    return trained


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_joint_training_equals_one_process(size: int) -> None:
    ranks = run_world(every_rule, size)
    expected = []
    for rule in RULES:
        if rule["dim"] == 1 or size != 3:
            model, optimizer = converted(torch.float64, **rule)
            train(model, optimizer, joint_batches())
            expected += [(weights(model), selections(model))] * 2
    for trained in ranks:
        assert_trained_alike(trained, expected)


DRAWN: dict[str, Any] = {"selection": "uniform", "state_policy": "keep", "explore": 2}


@torch.no_grad()
def change_by_hand(model: Network, name: str) -> dict[str, Tensor]:
    """Change a parameter of each converted layer in place; the state dict afterwards."""
    for layer in (model.up, model.mix):
        getattr(layer, name).mul_(1.25)
    return {key: value.clone() for key, value in weights_of(model.state_dict()).items()}


def changed_by_hand(rank: int, name: str, dim: int) -> list[dict[str, Tensor]]:
    model, optimizer = sharded(dim=dim, **DRAWN)
    train_jointly(model, optimizer, joint_batches(3))
    saved = change_by_hand(model, name)
    train_jointly(model, optimizer, joint_batches()[3:])
    return [saved, weights_of(model.state_dict())]


@pytest.mark.parametrize("name", ["weight", "active"])
@pytest.mark.parametrize("dim", [0, 1])
def test_values_changed_by_hand_reach_each_other(name: str, dim: int) -> None:
    """Weight and active rows agree in what is saved next, and in the next step."""
    model, optimizer = converted(torch.float64, dim=dim, **DRAWN)
    train(model, optimizer, joint_batches(3))
    saved = change_by_hand(model, name)
    train(model, optimizer, joint_batches()[3:])
    for ours in run_world(changed_by_hand, 2, name, dim):
        for found, expected in zip(ours, [saved, weights(model)], strict=True):
            assert_close(found, expected)


def changed_before_a_step(rank: int, name: str) -> list[Any]:
    """Whether the step finds a change that nothing was asked to save in between."""
    model, optimizer = sharded(**DRAWN)
    train_jointly(model, optimizer, joint_batches(3))
    with torch.no_grad():
        getattr(model.up, name).mul_(1.25)
    written = (
        model.up.rows().clone() if name == "active" else model.up.take(model.up.stored(), model.up.active_projector())
    )
    found: list[bool] = []
    follow = model.up.follow
    model.up.follow = lambda **how: (follow(**how), found.append(torch.equal(model.up.rows(), written)))  # type: ignore[method-assign]
    train_jointly(model, optimizer, joint_batches()[3:4])
    return [found, bool(model.up.holds_active())]


@pytest.mark.parametrize("name", ["weight", "active"])
def test_a_step_finds_values_changed_by_hand(name: str) -> None:
    assert run_world(changed_before_a_step, 2, name) == [[[True], True]] * 2


def stale_graphs(rank: int, offload: str | None) -> list[str]:
    """What backward of a graph says whose weights were stepped since; dense mode, compact mode and full rank."""
    said = []
    for mode, kept in ((m, k) for m in ("compact", "dense", "full") for k in (True, False)):
        if mode == "compact":
            model, optimizer = sharded(reshard_after_forward=kept, offload=offload)
        else:
            model = Network(torch.float64)
            for layer in (model.up, model.mix, model):
                fully_shard(layer, reshard_after_forward=kept)
            optimizer = GrassAdamW(model.parameters(), rank=3 if mode == "dense" else None, offload=offload)
        stale, current, *_ = (loss_of(model, batch) for batch in joint_batches(3))
        current.backward()
        optimizer.step()
        try:
            stale.backward()
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("offload", [None, pytest.param("cpu", marks=pytest.mark.slow)])
def test_a_graph_from_before_the_step_is_refused(offload: str | None) -> None:
    for said in run_world(stale_graphs, 2, offload):
        assert ["modified by an inplace operation" in text for text in said] == [True] * 6


def initialised_after_sharding(rank: int, way: str) -> dict[str, Tensor]:
    """torchtitan's order: meta, convert, shard, ``to_empty``, then values by hand."""
    source = dict(Network(torch.float64).named_parameters())
    with torch.device("meta"):
        model = Network(torch.float64)
    compact(model, rank=3, explore=2)
    placement = shard_placement_fn(model)
    for layer in (model.up, model.mix, model):
        fully_shard(layer, shard_placement_fn=placement)
    optimizer = GrassAdamW(model, **{**OPTIONS, "explore": None}) if way == "optimizer first" else None
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.to_local().data.fill_(1e30)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in source:
                p.copy_(distribute_tensor(source[name].detach(), p.device_mesh, p.placements))
    train_jointly(model, optimizer or GrassAdamW(model, **{**OPTIONS, "explore": None}), joint_batches())
    return gathered(model)


@pytest.mark.parametrize("way", ["optimizer first", "optimizer last"])
def test_meta_device(way: str) -> None:
    model = Network(torch.float64)
    compact(model, rank=3, explore=2)
    train(model, GrassAdamW(model, **{**OPTIONS, "explore": None}), joint_batches())
    expected = {name: value for name, value in model.state_dict().items() if not name.endswith("active")}
    for ours in run_world(initialised_after_sharding, 2, way):
        assert_close({name: value for name, value in ours.items() if name in expected}, expected)


def hybrid(rank: int) -> dict[str, Tensor]:
    model, optimizer = sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    train_jointly(model, optimizer, joint_batches())
    return weights_of(model.state_dict())


def test_hybrid_sharding() -> None:
    model, optimizer = converted(torch.float64)
    train(model, optimizer, joint_batches())
    for ours in run_world(hybrid, 4):
        assert_close(ours, weights(model))


def offloaded(rank: int) -> tuple[dict[str, Tensor], list[list[int]]]:
    model, optimizer = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False), **RULES[3])
    train_jointly(model, optimizer, joint_batches())
    return weights_of(model.state_dict()), selections(model)


def test_units_streamed_by_fsdp() -> None:
    """``CPUOffloadPolicy``: the engine beyond one device's ``grass.stream``."""
    model, optimizer = converted(torch.float64, **RULES[3])
    train(model, optimizer, joint_batches())
    for ours in run_world(offloaded, 2):
        assert_trained_alike([ours], [(weights(model), selections(model))])


def mixed(rank: int) -> tuple[dict[str, Tensor], str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, optimizer = sharded(torch.float32, mp_policy=policy, lr=1e-3)
    train_jointly(model, optimizer, joint_batches(dtype=torch.float32))
    return weights_of(model.state_dict()), str(model.up.active.dtype)


def test_mixed_precision_policy() -> None:
    start = weights(Network(torch.float32))
    model, optimizer = converted(torch.float32, lr=1e-3)
    train(model, optimizer, joint_batches(dtype=torch.float32))
    for ours, dtype in run_world(mixed, 2):
        assert dtype == "torch.float32"
        for name, value in weights(model).items():
            moved = (value - start[name]).norm()
            assert (ours[name] - value).norm() < 0.5 * moved, name  # a row or two may be chosen otherwise


def misplaced(rank: int) -> str:
    model = Network()
    compact(model, rank=4, explore=0, dim=0)
    fully_shard(model)
    with pytest.raises(ValueError, match="shard_placement_fn") as error:
        GrassAdamW(model)
    return str(error.value)


def test_a_sharded_selection_is_refused() -> None:
    for error in run_world(misplaced, 2):
        assert "Grass selects along dimension 0" in error


def checkpointed(rank: int, folder: Path, rule: dict[str, Any]) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Train with a checkpoint after five steps; returns where that ends."""
    model, optimizer = sharded(**rule)
    data = joint_batches()
    train_jointly(model, optimizer, data[:5])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train_jointly(model, optimizer, data[5:])
    return weights_of(model.state_dict()), selections(model)


def continued(rank: int, folder: Path, rule: dict[str, Any]) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Continue from the checkpoint in a fresh model."""
    model, optimizer = sharded(seed=1, **rule)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train_jointly(model, optimizer, joint_batches()[5:])
    return weights_of(model.state_dict()), selections(model)


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=pytest.mark.slow) for rule in RULES],
    ids=lambda rule: rule["state_policy"],
)
def test_checkpoint_across_world_sizes(rule: dict[str, Any], tmp_path: Path) -> None:
    expected, rows = run_world(checkpointed, 2, tmp_path, rule)[0]
    for size in (1, 2, 4):
        for ours, chosen in run_world(continued, size, tmp_path, rule):
            assert chosen == rows
            if size == 2:
                assert all(torch.equal(ours[name], value) for name, value in expected.items())
            else:
                assert_close(ours, expected)


def from_first_rank(rank: int) -> list[dict[str, Tensor]]:
    """Train on, and once more from the whole state as it was before, which the first rank alone has."""
    (model, optimizer), data = sharded(), joint_batches()
    train_jointly(model, optimizer, data[:5])
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = deepcopy(get_state_dict(model, optimizer, options=whole))
    assert bool(weights) == bool(states) == (rank == 0)
    train_jointly(model, optimizer, data[5:])
    again, restored = sharded(seed=1)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, weights, options=from_first)
    set_optimizer_state_dict(again, restored, states, options=from_first)
    train_jointly(again, restored, data[5:])
    return [weights_of(model.state_dict()), weights_of(again.state_dict())]


def test_a_whole_state_is_loaded_from_the_first_rank() -> None:
    for one, again in run_world(from_first_rank, 2):
        assert all(torch.equal(again[name], value) for name, value in one.items())


HALF: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "lr": 1e-3,
    "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
}


def masters(rank: int, folder: Path, first: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Train in bfloat16, or go on from a checkpoint if it is not the beginning; returns the weights and all masters."""
    model, optimizer = sharded(seed=first, **HALF)
    if first:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for step, batch in enumerate(joint_batches(8, torch.bfloat16)[first:], first):
        if step == 4 and not first:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        train_jointly(model, optimizer, [batch])
    held = [p for p in model.parameters() if "master" in optimizer.state.get(p, {})]
    found = [optimizer.state[p]["master"].full_tensor() for p in held]
    assert all(torch.equal(p.full_tensor(), m.bfloat16()) for p, m in zip(held, found, strict=True))
    return weights_of(model.state_dict()), found


def test_masters_of_sharded_parameters_resume_bit_for_bit(tmp_path: Path) -> None:
    expected, every = run_world(masters, 2, tmp_path, 0)[0]
    assert every
    for ours, found in run_world(masters, 2, tmp_path, 4):
        assert all(torch.equal(ours[name], value) for name, value in expected.items())
        assert all(torch.equal(a, b) for a, b in zip(found, every, strict=True))


def bytes_of_state(rank: int) -> int:
    """Of AdamW on a weight that one dimension of a mesh divides; the mesh refers to itself."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "shards"))["shards"]
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight])
    weight.square().sum().backward()
    optimizer.step()
    return state_bytes(optimizer).device


def test_bytes_of_a_sharded_state() -> None:
    """Two moments of a rank's half, and the count of steps."""
    assert run_world(bytes_of_state, 2) == [2 * 12 * 4 + 4] * 2


def converted_again(rank: int) -> tuple[list[str], list[str]]:
    model, _ = sharded()
    return compact(model, rank=3, explore=0), compact(Network(torch.float64), rank=3, explore=0)


def test_converted_layers_stay_as_they_are_once_sharded() -> None:
    for again, first in run_world(converted_again, 2):
        assert again == first
