"""Dense mode on weights that ranks divide along the selected dimension equals one process with the same strata."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import Network, loss_of
from tests.distributed.strata import EXACT, split, whole_state
from tests.distributed.test_compact_tensor_parallel import (
    divided,
    meshes,
    own_share,
    through_a_checkpoint,
    train,
    whole,
)
from tests.distributed.training import assert_close, joint_batches
from tests.distributed.world import run_world

STEPS = 7
OPTIONS: dict[str, Any] = {"rank": 0.25, "lr": 1e-2, "update_interval": 2}
CASES: list[dict[str, Any]] = [
    {},
    {"selection": "top_r", "explore": 0.25},
    {"selection": "multinomial_norm", "state_policy": "bank", "explore": 0},
    {"selection": "balanced", "state_policy": "reset", "decay": "all", "weight_decay": 0.1},
]
PARALLEL = (2,)
BOTH = (2, 2)
FSDP2 = ("fsdp2",)
STRATA: dict[tuple[Any, int], list[str]] = {
    (PARALLEL, 0): ["mix"],
    (PARALLEL, 1): ["up", "down"],
    (BOTH, 1): ["up", "down"],
    (FSDP2, 0): ["up", "mix", "down"],
}
"""Layers that two ranks divide along the selected dimension, by how they are parallel and by this dimension."""


def sharded(how: tuple[Any, ...], dim: int, **options: Any) -> tuple[Network, GrassAdamW, Any]:
    """A network, its optimizer, and the mesh whose ranks have data of their own; no ``how`` is one process."""
    model, data = Network(torch.float64), None
    if how == FSDP2:
        data = init_device_mesh("cpu", (2,))
    elif how:
        data, parts = meshes(*how) if len(how) > 1 else (None, init_device_mesh("cpu", how))
        model = divided(parts)
    if data is not None:
        for module in (model.up, model.mix, model.down, model):
            fully_shard(module, mesh=data)
    settings = {**OPTIONS, **options}
    return model, GrassAdamW(grass.param_groups(model, settings.pop("rank")), dim=dim, **settings), data


def parallel(rank: int, how: tuple[Any, ...], dim: int) -> list[Any]:
    every = []
    for options in CASES:
        model, optimizer, data = sharded(how, dim, **options)
        norms = train(model, optimizer, [own_share(batch, data) for batch in joint_batches(STEPS)])
        every.append(({name: whole(value) for name, value in model.state_dict().items()}, norms))
    return every


def one_process(layers: list[str], dim: int, options: dict[str, Any]) -> tuple[nn.Module, GrassAdamW, list[Tensor]]:
    """A process whose layers are two each, with the draws that the strata have."""
    model = Network(torch.float64)
    strata = split(model, dict.fromkeys(layers, 2), dim)
    optimizer = GrassAdamW(strata.groups(model), dim=dim, **{**OPTIONS, **options})
    with strata.draws():
        norms = train(model, optimizer, joint_batches(STEPS))
    return model, optimizer, norms


@pytest.mark.parametrize(
    ("how", "dim"),
    [
        pytest.param(PARALLEL, 1, id="tensor parallelism"),
        pytest.param(PARALLEL, 0, id="tensor parallelism, rows", marks=pytest.mark.slow),
        pytest.param(FSDP2, 0, id="fsdp2, rows"),
        pytest.param(BOTH, 1, id="both", marks=pytest.mark.slow),
    ],
)
def test_equals_one_process_with_the_same_strata(how: tuple[Any, ...], dim: int) -> None:
    ranks = run_world(parallel, 4 if how == BOTH else 2, how, dim)
    for number, options in enumerate(CASES):
        model, _, norms = one_process(STRATA[how, dim], dim, options)
        expected = whole_state(model)
        assert all(not torch.equal(expected[f"{name}.weight"], before(name)) for name in STRATA[how, dim])
        for every in ranks:
            ours, our_norms = every[number]
            assert_close(ours, expected, **EXACT)
            torch.testing.assert_close(our_norms, norms, **EXACT)


def before(name: str) -> Tensor:
    """A layer's weight before training."""
    return Network(torch.float64).get_submodule(name).weight.detach()


def state_of_up(rank: int) -> dict[str, Tensor]:
    model, optimizer, _ = sharded(PARALLEL, 1)
    train(model, optimizer, joint_batches(STEPS))
    state = optimizer.state_dict()["state"][0]
    return {key: whole(state[key]) for key in ("indices", "exp_avg", "exp_avg_sq")}


def test_the_state_is_that_of_the_whole_weight() -> None:
    model, optimizer, _ = one_process(["up", "down"], 1, {})
    first, second = (optimizer.state[block.weight] for block in model.up.blocks)
    expected = {key: torch.cat([first[key], second[key]], dim=1) for key in ("exp_avg", "exp_avg_sq")}
    expected["indices"] = torch.cat([first["indices"], second["indices"] + 6])
    for ours in run_world(state_of_up, 2):
        assert_close(ours, expected, **EXACT)


INTERVAL = 5
"""The next selection after a checkpoint at six steps, which have selected twice, is in step eleven."""


def saved(rank: int, how: tuple[Any, ...], dim: int, folder: Path, first: int) -> tuple[dict[str, Tensor], Any]:
    """Train nine steps with a checkpoint after six, or load this one; returns weights and rows."""
    model, optimizer, data = sharded(how, dim, rank=4, explore=0, update_interval=INTERVAL)
    return through_a_checkpoint(model, optimizer, data, folder, first)


@pytest.mark.parametrize(
    ("how", "others", "dim"),
    [
        pytest.param(PARALLEL, [()], 1, id="tensor parallelism"),
        pytest.param(FSDP2, [()], 0, id="fsdp2, rows", marks=pytest.mark.slow),
        pytest.param(BOTH, [(), (2,), (1, 2)], 1, id="both", marks=pytest.mark.slow),
    ],
)
def test_checkpoint(how: tuple[Any, ...], others: list[tuple[Any, ...]], dim: int, tmp_path: Path) -> None:
    """Loaded by as many ranks it goes on bit for bit, by others as exactly as sums over ranks allow."""
    size = {FSDP2: 2, (): 1}
    expected, rows = run_world(saved, size.get(how) or math.prod(how), how, dim, tmp_path, 0)[0]
    assert all(len(indices) == 4 for indices in rows)
    for loaded in (how, *others):
        for ours, chosen in run_world(saved, size.get(loaded) or math.prod(loaded), loaded, dim, tmp_path, 6):
            assert all(torch.equal(a, b) for a, b in zip(chosen, rows, strict=True))
            if loaded == how:
                assert all(torch.equal(ours[name], value) for name, value in expected.items())
            else:
                assert_close(ours, expected, **EXACT)


def half_without_gradient(rank: int) -> list[Any]:
    """The second half of the inputs is zero, and so is every gradient of the second stratum of ``up``."""
    model, optimizer, _ = sharded(PARALLEL, 1, selection="top_r")
    for x, y in joint_batches(STEPS):
        x[:, 6:] = 0
        optimizer.zero_grad()
        loss_of(model, (x, y)).backward()
        optimizer.step()
    return [optimizer.state[model.up.weight]["refreshes"], {k: whole(v) for k, v in model.state_dict().items()}]


def test_a_stratum_without_gradients_counts_the_refreshes_of_the_others() -> None:
    first, second = run_world(half_without_gradient, 2)
    assert first[0] == second[0] == 1 + STEPS // 2
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)


def refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def weight(rows: int, columns: int) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(torch.ones(rows, columns), mesh, [Shard(1)]))

    for options, message in (
        ({"rank": 3}, r"Invalid rank=3: must be a multiple of the 2 strata"),
        ({"rank": 2, "explore": 3}, r"Invalid explore=3: must be a multiple of the 2 strata"),
        ({"rank": 2, "replacement": True, "selection": "multinomial_norm"}, "replacement=True does not take weights"),
        ({"rank": 2, "offload": "cpu"}, "offload does not take weights that ranks divide"),
    ):
        with pytest.raises(ValueError, match=message):
            GrassAdamW([weight(4, 8)], **options)
    with pytest.raises(ValueError, match=r"shape \(4, 7\) is divided along the selected dimension 1 among 2 ranks"):
        GrassAdamW([weight(4, 7)], rank=2)
    assert isinstance(weight(4, 8).data, DTensor)


def test_what_is_refused() -> None:
    run_world(refused, 2)
