"""Compact mode on experts that ranks divide equals one process that draws as these ranks do."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import grass
from grass import GrassAdamW
from grass.distributed import shard_placement_fn
from tests.distributed.expert_parallelism import (
    ExpertParallel,
    drawing_as_ranks,
    loss_of,
    mixture,
    train,
    weights,
    whole,
)
from tests.distributed.strata import EXACT
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

STEPS = range(8)
ROWS: dict[str, Any] = {"rank": 3, "explore": 2}
CASES: list[dict[str, Any]] = [
    {},
    {"selection": "balanced"},
    {"selection": "multinomial_norm", "sketch_size": 3, "state_policy": "bank"},
    {"selection": "top_r", "refresh": "exact", "state_policy": "reset", "weight_decay": 0.1},
]


def built(sizes: tuple[int, ...], dim: int, rows: dict[str, Any] = ROWS, **options: Any) -> tuple[Any, GrassAdamW]:
    """In one process, with experts divided, or with each divided by FSDP2 too, over a mesh of these sizes."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "experts")[-len(sizes) :]) if sizes else None
    model: Any = mixture(None if mesh is None else mesh["experts"])
    grass.compact(model, dim=dim, **rows)
    if len(sizes) > 1 and mesh is not None:
        fully_shard(model.experts, mesh=mesh["data"], shard_placement_fn=shard_placement_fn(model))
        model.experts.set_gradient_divide_factor(mesh.size())
    return model, GrassAdamW(model, **{"lr": 1e-2, "update_interval": 2, **options})


def counters(optimizer: GrassAdamW) -> list[list[int]]:
    return [[s[key] for key in ("step", "refresh_step", "refreshes")] for s in optimizer.state.values() if "dim" in s]


def seen(sizes: tuple[int, ...], dim: int, rank: int = 0, **options: Any) -> dict[str, Any]:
    """Norms that were clipped, weights, counters, and losses before and after :func:`grass.expand`."""
    (model, optimizer), ranks = built(sizes, dim, **options), math.prod(sizes)
    norms = train(model, optimizer, STEPS, rank, ranks)
    found: dict[str, Any] = {"norms": dict(enumerate(norms)), "weights": weights(model), "ages": counters(optimizer)}
    with torch.no_grad():
        losses = [loss_of(model, 0, rank, ranks)]
        if len(sizes) < 2:
            grass.expand(model)
            losses.append(loss_of(model, 0, rank, ranks))
            assert_close(weights(model), found["weights"], rtol=0.0, atol=0.0)
    return {**found, "losses": losses}


def on_ranks(rank: int, sizes: tuple[int, ...], dim: int) -> list[dict[str, Any]]:
    return [seen(sizes, dim, rank, **case) for case in CASES]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2,), id="two experts each"),
        pytest.param((4,), id="one expert each", marks=pytest.mark.slow),
        pytest.param((2, 2), id="fsdp2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_equals_one_process(dim: int, sizes: tuple[int, ...]) -> None:
    every = run_world(on_ranks, math.prod(sizes), sizes, dim)
    for number, case in enumerate(CASES):
        with drawing_as_ranks(sizes[-1]):
            expected = seen((), dim, **case)
        assert all(float(norm) > 0.2 for norm in expected["norms"].values())
        for found in (own[number] for own in every):
            assert_close(found["norms"], expected["norms"], **EXACT)
            assert_close(found["weights"], expected["weights"], **EXACT)
            assert found["ages"] == expected["ages"]
            torch.testing.assert_close(found["losses"], found["losses"][:1] * len(found["losses"]), **EXACT)
        mean = torch.stack([own[number]["losses"][0] for own in every]).mean()
        torch.testing.assert_close(mean, expected["losses"][0], **EXACT)


def all_sharded(rank: int) -> list[dict[str, Any]]:
    """Experts divided and sharded over 2 x 2 ranks, everything else sharded over all four."""
    every = []
    for options in CASES:
        model, optimizer = built((2, 2), 1, **options)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=shard_placement_fn(model))
        optimizer = GrassAdamW(model, **{"lr": 1e-2, "update_interval": 2, **options})
        norms = train(model, optimizer, STEPS, rank, 4)
        every.append({"norms": dict(enumerate(norms)), "weights": weights(model), "ages": counters(optimizer)})
    return every


@pytest.mark.slow
def test_a_model_that_fsdp2_shards_beside_its_experts() -> None:
    every = run_world(all_sharded, 4)
    for number, options in enumerate(CASES):
        with drawing_as_ranks(2):
            expected = seen((), 1, **options)
        for found in (own[number] for own in every):
            assert_close(found["norms"], expected["norms"], **EXACT)
            assert_close(found["weights"], expected["weights"], **EXACT)
            assert found["ages"] == expected["ages"]


def test_the_reference_trains() -> None:
    """Each weight moves, and the same as without the draws of ranks does not come out."""
    before = weights(mixture())
    with drawing_as_ranks(2):
        after = seen((), 1)["weights"]
    for name, value in seen((), 1)["weights"].items():
        assert not torch.equal(after[name], before[name])
        assert not torch.equal(after[name], value)


def resumed(rank: int, sizes: tuple[int, ...], dim: int) -> None:
    """State dicts bring back weights, rows and draws to the bit."""
    for options in CASES[::2]:
        (model, optimizer), ranks = built(sizes, dim, **options), math.prod(sizes)
        train(model, optimizer, range(3), rank, ranks)
        other, by = built(sizes, dim, **options)
        other.load_state_dict(model.state_dict())
        by.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares what it loads
        for each in ((model, optimizer), (other, by)):
            train(*each, range(3, 7), rank, ranks)
        assert_close(weights(other), weights(model), rtol=0.0, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_state_dicts(dim: int) -> None:
    run_world(resumed, 2, (2,), dim)


SAVED: dict[str, Any] = {"rank": 3, "explore": 0}
"""What is explored would be drawn otherwise where ranks are others, and so would the next rows: after ten steps."""
KEPT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SAVED, {}),
    (SAVED, {"state_policy": "bank"}),
    (SAVED | {"dtype": torch.float32}, {}),
]
"""How models are converted, and optimizers. The last rows have values that the weight cannot give back; not for FSDP2,
which divides float32 by a factor in a way that gloo does not know."""


def saved(rank: int, sizes: tuple[int, ...], dim: int, folder: Path, first: int) -> list[Any]:
    """Train nine steps with a checkpoint after six, or load this one; returns weights and rows."""
    found: list[Any] = []
    for number, (conversion, options) in enumerate(KEPT[:2] if len(sizes) == 2 else KEPT):
        if first and not (folder / str(number)).exists():
            break
        (model, optimizer), ranks = built(sizes, dim, conversion, update_interval=5, **options), math.prod(sizes)
        train(model, optimizer, range(first, 6), rank, ranks)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if first == 0:
            dcp.save(states, checkpoint_id=folder / str(number))
        else:
            dcp.load(states, checkpoint_id=folder / str(number))
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        train(model, optimizer, range(6, 9), rank, ranks)
        rows = [whole(state["indices"]) for state in optimizer.state_dict()["state"].values() if "indices" in state]
        found.append([weights(model), rows, counters(optimizer)])
    return found


def trained(sizes: tuple[int, ...], dim: int, folder: Path, first: int) -> list[list[Any]]:
    """:func:`saved` on each rank, or in this process."""
    if not sizes:
        return [saved(0, sizes, dim, folder, first)]
    return run_world(saved, math.prod(sizes), sizes, dim, folder, first)


@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        pytest.param((2,), [()], id="two ranks", marks=pytest.mark.slow),
        pytest.param((), [(2,)], id="one process", marks=pytest.mark.slow),
        pytest.param((4,), [(), (2,), (2, 2)], id="four ranks", marks=pytest.mark.slow),
        pytest.param((2, 2), [(), (4,)], id="fsdp2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_checkpoint(dim: int, sizes: tuple[int, ...], others: list[tuple[int, ...]], tmp_path: Path) -> None:
    expected = trained(sizes, dim, tmp_path, 0)[0]
    for loaded in (sizes, *others):
        for ours in trained(loaded, dim, tmp_path, 6):
            assert len(ours) >= 2
            for (found, rows, ages), (wanted, wanted_rows, wanted_ages), (conversion, _) in zip(
                ours, expected, KEPT, strict=False
            ):
                assert all(torch.equal(a, b) for a, b in zip(rows, wanted_rows, strict=True))
                assert ages == wanted_ages
                others_too = {"rtol": 1e-5, "atol": 1e-6} if "dtype" in conversion else EXACT
                assert_close(found, wanted, **(others_too if loaded != sizes else {"rtol": 0.0, "atol": 0.0}))


def plain(rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Not converted, under torch's AdamW."""
    model = mixture(init_device_mesh("cpu", (2,)))
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), STEPS, rank, 2), weights(model)


def test_experts_that_are_not_converted() -> None:
    model = mixture()
    norms = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), STEPS)
    for own, found in run_world(plain, 2):
        torch.testing.assert_close(own, norms, **EXACT)
        assert_close(found, weights(model), **EXACT)


def refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = mixture(mesh)
    with pytest.raises(ValueError, match="weights='int8': layers that expert parallelism divides"):
        grass.compact(model, rank=3, weights="int8")
    with pytest.raises(ValueError, match=r"placed as \(Shard\(dim=0\),\).*for tensor or expert parallelism train in"):
        GrassAdamW(grass.param_groups(model, rank=3))
    grass.compact(model, rank=3)
    assert grass.compact(model, rank=3)
    with pytest.raises(ValueError, match=r"attach\(\) does not take layers that expert parallelism"):
        grass.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), model)
    with pytest.raises(ValueError, match="offload does not take layers that expert parallelism"):
        GrassAdamW(model, offload="cpu")
    with pytest.raises(ValueError, match=r"rank=4: must be None or 3"):
        GrassAdamW(model, rank=4)
    GrassAdamW(model, rank=3)
    for placement in (Shard(1), Shard(2), Replicate()):
        model = mixture()
        model.experts.up = nn.Parameter(distribute_tensor(model.experts.up, mesh, [placement]))
        with pytest.raises(ValueError, match=r"'experts\.up' is placed as .* or experts divided by Shard\(0\)"):
            grass.compact(model, rank=3)
        assert grass.compact(model, rank=3, exclude=["experts.up"]) == ["before", "behind", "experts.down"]
    model = mixture()
    model.experts.up = nn.Parameter(distribute_tensor(model.experts.up.detach()[:3], mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"2 ranks do not share the 3 experts of 'experts\.up' evenly"):
        grass.compact(model, rank=3)
    model = mixture()
    fully_shard(model.experts)
    with pytest.raises(RuntimeError, match=r"Too late to convert 'experts\.up'"):
        grass.compact(model, rank=3, exclude=["before", "behind"])
    model = mixture()
    grass.compact(model, rank=3)
    parallelize_module(model, mesh, {"experts": ExpertParallel()})
    with pytest.raises(TypeError, match=r"'experts\.up' is a DTensor in forward: call parallelize_module before"):
        loss_of(model, 0, rank, 2)


def divided_by_expert_twice(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    model = mixture(mesh["experts"])
    grass.compact(model, rank=3)
    fully_shard(model.experts, mesh=mesh["data"])
    with pytest.raises(ValueError, match=r"selects along dimension . of each expert: .*shard_placement_fn"):
        GrassAdamW(model)


@pytest.mark.slow
def test_fsdp2_without_a_layout_is_refused() -> None:
    run_world(divided_by_expert_twice, 4)


def test_what_is_refused() -> None:
    run_world(refused, 2)


def from_meta(rank: int, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Build, divide and convert without memory; then load the weights."""
    values = mixture().state_dict()
    with torch.device("meta"):
        model, _ = built(sizes, 1)
    model.to_empty(device="cpu")
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    train(model, GrassAdamW(model, lr=1e-2, update_interval=2), STEPS, rank, math.prod(sizes))
    return weights(model)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=["divided", "fsdp2"])
def test_from_the_meta_device(sizes: tuple[int, ...]) -> None:
    with drawing_as_ranks(2):
        expected = seen((), 1)["weights"]
    for ours in run_world(from_meta, math.prod(sizes), sizes):
        assert_close(ours, expected, **EXACT)
