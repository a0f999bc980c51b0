"""Compact mode on layers that ``parallelize_module`` has divided equals one process with the same strata."""

from __future__ import annotations

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
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import Network, compact_layers, loss_of
from tests.distributed.parallel_2d.decoders import decoder, ids, plain_loss
from tests.distributed.strata import EXACT, convert, whole_state
from tests.distributed.training import assert_close, joint_batches
from tests.distributed.world import run_world

ROWS = {"rank": 0.25, "explore": 0.25}
OPTIONS: dict[str, Any] = {"scale": 1.0, "lr": 1e-2, "update_interval": 2}
STEPS = 7
CASES: list[dict[str, Any]] = [
    {},
    {"selection": "top_r", "refresh": "exact"},
    {"selection": "multinomial_norm", "sketch_size": 3, "state_policy": "bank"},
    {"state_policy": "reset", "decay": "all", "weight_decay": 0.1},
]
STRATA = {1: {"up": 2, "down": 2}, 0: {"mix": 2}}
"""Layers that are divided along the selected dimension, by this dimension."""


def plan() -> dict[str, Any]:
    """A bias that all have, a bias that is divided, and no bias."""
    return {"up": RowwiseParallel(input_layouts=Replicate()), "mix": ColwiseParallel(), "down": RowwiseParallel()}


def divided(mesh: Any) -> Network:
    return parallelize_module(Network(torch.float64), mesh, plan())


def clip(model: nn.Module) -> Tensor:
    """Clip what is divided; torch does not mix ``DTensor`` with the norm's plain gradients."""
    return nn.utils.clip_grad_norm_([p for name, p in model.named_parameters() if not name.startswith("norm")], 0.1)


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def train(model: nn.Module, optimizer: GrassAdamW, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The ordinary loop; returns the norms that were clipped."""
    norms = []
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norms.append(whole(clip(model)))
        optimizer.step()
    return norms


def one_process(dim: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = Network(torch.float64)
    convert(model, STRATA[dim], dim, **ROWS)
    norms = train(model, GrassAdamW(model, **OPTIONS, **options), joint_batches(STEPS))
    return whole_state(model), norms


def meshes(*sizes: int) -> tuple[Any, Any]:
    """Data and tensor parallelism, each a mesh of its own."""
    names = ("replicas", "shards", "parts")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return mesh[names[:-1]], mesh["parts"]


def own_share(batch: tuple[Tensor, Tensor], data: Any) -> tuple[Tensor, Tensor]:
    """The part of a batch that this rank's tensor-parallel group has."""
    if data is None:
        return batch
    number = 0
    for size, place in zip(data.shape, data.get_coordinate(), strict=True):
        number = number * size + place
    return batch[0].chunk(data.size())[number], batch[1].chunk(data.size())[number]


def sharded(sizes: tuple[int, ...], dim: int, rows: dict[str, Any], **options: Any) -> tuple[Network, GrassAdamW, Any]:
    """Tensor parallelism, conversion, FSDP2, in this order; the first and the last only over several ranks.

    Also returns the mesh whose ranks have data of their own, if there is one.
    """
    model, data = Network(torch.float64), None
    if sizes:
        data, parts = meshes(*sizes) if len(sizes) > 1 else (None, init_device_mesh("cpu", sizes))
        model = divided(parts)
    grass.compact(model, dim=dim, **rows)
    if data is not None:
        placement = grass.distributed.shard_placement_fn(model)
        for module in (model.up, model.mix, model.down, model):
            fully_shard(module, mesh=data, shard_placement_fn=placement)
    return model, GrassAdamW(model, **{**OPTIONS, **options}), data


def parallel(rank: int, dim: int, sizes: tuple[int, ...], cases: list[dict[str, Any]]) -> list[Any]:
    every = []
    for options in cases:
        model, optimizer, data = sharded(sizes, dim, ROWS, **options)
        norms = train(model, optimizer, [own_share(batch, data) for batch in joint_batches(STEPS)])
        every.append(({name: whole(value) for name, value in model.state_dict().items()}, norms))
    return every


def half_without_gradient(rank: int) -> list[Any]:
    """The second half of the inputs is zero, and so is every gradient of the second stratum of ``up``."""
    model, optimizer, _ = sharded((2,), 1, ROWS, selection="top_r")
    for x, y in joint_batches(STEPS):
        x[:, 6:] = 0
        optimizer.zero_grad()
        loss_of(model, (x, y)).backward()
        optimizer.step()
    return [optimizer.state[model.up.active]["refreshes"], {k: whole(v) for k, v in model.state_dict().items()}]


def test_a_stratum_without_gradients_counts_the_refreshes_of_the_others() -> None:
    first, second = run_world(half_without_gradient, 2)
    assert first[0] == second[0] == 1 + STEPS // 2
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2,), id="alone"),
        pytest.param((2, 2), id="fsdp2", marks=pytest.mark.slow),
        pytest.param((2, 1, 2), id="replicas", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), id="hsdp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_equals_one_process_with_the_same_strata(dim: int, sizes: tuple[int, ...]) -> None:
    cases = CASES if len(sizes) < 3 else CASES[:1]
    ranks = run_world(parallel, math.prod(sizes), dim, sizes, cases)
    for number, options in enumerate(cases):
        expected, norms = one_process(dim, options)
        assert all(float(norm) > 0.1 for norm in norms)
        for every in ranks:
            ours, our_norms = every[number]
            assert ours.keys() == expected.keys()
            assert_close(ours, expected, **EXACT)
            torch.testing.assert_close(our_norms, norms, **EXACT)


def test_the_reference_trains() -> None:
    """The reference moves all of its layers, or the comparison would say little."""
    before = Network(torch.float64).state_dict()
    for dim in STRATA:
        after, _ = one_process(dim, {})
        assert all(not torch.equal(before[name], after[name]) for name in before)


SAVED: dict[str, Any] = {"rank": 4, "explore": 0}
"""Multiples of up to four strata; what is explored would be drawn otherwise where the strata are others."""
INTERVAL = 5
"""The next selection after a checkpoint at six steps, which have selected once, is at ten."""


def saved(rank: int, sizes: tuple[int, ...], dim: int, folder: Path, first: int) -> tuple[dict[str, Tensor], Any]:
    """Train nine steps with a checkpoint after six, or load this one; returns weights and rows."""
    model, optimizer, data = sharded(sizes, dim, SAVED, update_interval=INTERVAL)
    return through_a_checkpoint(model, optimizer, data, folder, first)


def through_a_checkpoint(
    model: nn.Module, optimizer: GrassAdamW, data: Any, folder: Path, first: int
) -> tuple[dict[str, Tensor], Any]:
    """As :func:`saved`; ``first`` is the step to begin with: 0 saves, 6 loads."""
    batches = [own_share(batch, data) for batch in joint_batches(9)]
    train(model, optimizer, batches[first:6])
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if first == 0:
        dcp.save(states, checkpoint_id=folder)
    else:
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(model, optimizer, batches[6:])
    rows = [whole(state["indices"]) for state in optimizer.state_dict()["state"].values() if "indices" in state]
    return {name: whole(value) for name, value in model.state_dict().items()}, rows


@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        pytest.param((2,), [()], id="alone", marks=pytest.mark.slow),
        pytest.param((2, 2), [(), (2,), (1, 2)], id="fsdp2", marks=pytest.mark.slow),
        pytest.param((1, 4), [(), (2, 2), (4, 1)], id="four strata", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_checkpoint(dim: int, sizes: tuple[int, ...], others: list[tuple[int, ...]], tmp_path: Path) -> None:
    expected, rows = run_world(saved, math.prod(sizes), sizes, dim, tmp_path, 0)[0]
    assert all(len(indices) == SAVED["rank"] for indices in rows)
    for loaded in (sizes, *others):
        for ours, chosen in run_world(saved, math.prod(loaded), loaded, dim, tmp_path, 6):
            assert all(torch.equal(a, b) for a, b in zip(chosen, rows, strict=True))
            if loaded == sizes:
                assert all(torch.equal(ours[name], value) for name, value in expected.items())
            else:
                assert_close(ours, expected, **EXACT)


def spread(rank: int, dim: int, folder: Path) -> list[Any]:
    """Load what one process has saved, compare, and train on; returns the rows of each layer, by stratum."""
    model, optimizer, _ = sharded((2,), dim, SAVED)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    chosen = {name: layer.selected.tolist() for name, layer in compact_layers(model).items()}
    for name, layer in compact_layers(model).items():
        assert layer.holds_active(), name
    loaded = {name: whole(value) for name, value in model.state_dict().items()}
    train(model, optimizer, joint_batches(3))
    assert all(not torch.equal(whole(model.state_dict()[name]), value) for name, value in loaded.items())
    return [chosen, loaded]


@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_checkpoint_of_one_process(dim: int, tmp_path: Path) -> None:
    """Its rows are those of the whole weight; each stratum keeps the first of its own and takes others to be enough."""
    model = Network(torch.float64)
    grass.compact(model, dim=dim, **SAVED)
    optimizer = GrassAdamW(model, **OPTIONS)
    train(model, optimizer, joint_batches(6))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    layers = compact_layers(model)
    for stratum, (chosen, loaded) in enumerate(run_world(spread, 2, dim, tmp_path)):
        assert_close(loaded, dict(model.state_dict()), rtol=0.0, atol=0.0)
        for name, layer in layers.items():
            saved_rows = layer.selected.tolist()
            if name not in STRATA[dim]:
                assert chosen[name] == saved_rows
                continue
            size = layer.shape[dim] // 2
            own = [row - stratum * size for row in saved_rows if row // size == stratum]
            assert len(chosen[name]) == SAVED["rank"] // 2
            assert set(own[: len(chosen[name])]) <= set(chosen[name])


def from_meta(rank: int, sizes: tuple[int, ...], way: str) -> dict[str, Tensor]:
    """Build, divide and convert without memory; then load the weights, or write them by hand."""
    with torch.device("meta"):
        model, _, data = sharded(sizes, 1, ROWS)
    model.to_empty(device="cpu")
    values = Network(torch.float64).state_dict()
    if way == "loaded":
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    else:
        every = model.named_parameters() if way == "initialised" else model.state_dict(keep_vars=True).items()
        for name, p in every:
            if name not in values:  # active columns, which are the weight's
                continue
            placed = isinstance(p, DTensor)
            value = distribute_tensor(values[name], p.device_mesh, p.placements) if placed else values[name]
            with torch.no_grad():
                p.copy_(value)
    train(model, GrassAdamW(model, **OPTIONS), [own_share(batch, data) for batch in joint_batches(STEPS)])
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=["alone", "fsdp2"])
@pytest.mark.parametrize(
    "way",
    [pytest.param("loaded", marks=pytest.mark.slow), pytest.param("state dict", marks=pytest.mark.slow), "initialised"],
)
def test_from_the_meta_device(way: str, sizes: tuple[int, ...]) -> None:
    expected, _ = one_process(1, {})
    for ours in run_world(from_meta, math.prod(sizes), sizes, way):
        assert_close(ours, expected, **EXACT)


def decoder_plan() -> dict[str, Any]:
    """The usual one; embedding, norms and head stay plain."""
    by_output = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    by_input = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in by_output}
    return {**plan, **{f"model.layers.*.{name}": RowwiseParallel() for name in by_input}}


def train_decoder(model: Any) -> None:
    optimizer = GrassAdamW(model, **OPTIONS)
    for step in range(4):
        optimizer.zero_grad()
        plain_loss(model, ids(step)).backward()
        optimizer.step()


def decoder_divided(rank: int) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """Also the logits without gradients, and the weights after :func:`grass.expand`."""
    model = parallelize_module(decoder(), init_device_mesh("cpu", (2,)), decoder_plan())
    grass.compact(model, **ROWS)
    train_decoder(model)
    trained = {name: whole(value) for name, value in model.state_dict().items()}
    with torch.no_grad():
        logits = [model(input_ids=ids(0)).logits]
    grass.expand(model)
    logits.append(model(input_ids=ids(0)).logits.detach())
    return trained, logits, {name: whole(value) for name, value in model.state_dict().items()}


def test_a_decoder() -> None:
    model = decoder()
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    convert(model, {name: 2 for name in linears if name.endswith(("o_proj", "down_proj"))}, **ROWS)
    train_decoder(model)
    with torch.no_grad():
        logits = model(input_ids=ids(0)).logits
    for ours, theirs, expanded in run_world(decoder_divided, 2):
        assert_close(ours, whole_state(model), **EXACT)
        torch.testing.assert_close(theirs, [logits, logits], **EXACT)
        assert ours.keys() == expanded.keys()
        assert all(torch.equal(ours[name], value) for name, value in expanded.items())


def refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = divided(mesh)
    for arguments, message in [
        ({"rank": 3}, "rank=3: must be a multiple of the 2 strata"),
        ({"rank": 4, "explore": 1}, "explore=1: must be a multiple of the 2 strata"),
        ({"rank": 0.25, "weights": "int8"}, "weights='int8': layers that tensor parallelism"),
    ]:
        with pytest.raises(ValueError, match=message):
            grass.compact(model, **arguments)
    before = whole(model.up.weight)
    grass.compact(model, **ROWS)
    assert torch.equal(whole(model.up.weight), before)
    with pytest.raises(TypeError, match=r"'mix' is divided by .*takes a DTensor, got a plain tensor"):
        model.mix.forward(torch.zeros(2, 20, dtype=torch.float64))
    with pytest.raises(ValueError, match="offload does not take layers that tensor parallelism"):
        GrassAdamW(model, offload="cpu")
    with pytest.raises(ValueError, match=r"attach\(\) does not take layers that tensor parallelism"):
        grass.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), model)
    model = Network()
    distribute_module(model.up, mesh)
    with pytest.raises(ValueError, match="'up' is placed as Replicate"):
        grass.compact(model, **ROWS)
    model = Network()
    model.up = nn.Linear(12, 7)
    parallelize_module(model, mesh, {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"'up' of shape \(7, 12\) is placed as Shard\(dim=0\).* not share evenly"):
        grass.compact(model, **ROWS)


def test_what_is_refused() -> None:
    run_world(refused, 2)


def evaluated(rank: int) -> list[Any]:
    model, optimizer, _ = sharded((2,), 1, ROWS)
    data = joint_batches(4)
    train(model, optimizer, data[:2])
    with torch.inference_mode():
        loss = whole(loss_of(model, data[2]))
    train(model, optimizer, data[2:])
    return [loss, {name: whole(value) for name, value in model.state_dict().items()}]


def test_inference_mode_between_steps() -> None:
    """As without gradients, and training goes on."""
    model, data = Network(torch.float64), joint_batches(4)
    convert(model, STRATA[1], 1, **ROWS)
    optimizer = GrassAdamW(model, **OPTIONS)
    train(model, optimizer, data[:2])
    with torch.no_grad():
        expected = loss_of(model, data[2])
    train(model, optimizer, data[2:])
    for loss, weights in run_world(evaluated, 2):
        torch.testing.assert_close(loss, expected, **EXACT)
        assert_close(weights, whole_state(model), **EXACT)
