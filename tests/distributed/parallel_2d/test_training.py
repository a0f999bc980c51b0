"""The loop around a model on a grid: AdamW at full rank, accumulation, replicas, saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import grass
from grass import GrassAdamW
from tests.distributed.parallel_2d.decoders import decoder, ids, labels_of, on_grid, plain_loss, whole
from tests.distributed.parallel_2d.test_compact import OPTIONS, ROWS, train_step
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

EXACT = {"rtol": 1e-11, "atol": 1e-11}
"""In float64 only the order of sums differs; Adam's division magnifies it."""


def adamw(rank: int) -> list[dict[str, Tensor]]:
    """Torch's AdamW and ours at full rank."""
    every = []
    for optimizer_of in (torch.optim.AdamW, GrassAdamW):
        model = on_grid(decoder(), 2, 2)
        optimizer = optimizer_of(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(4):
            train_step(model, optimizer, step)
        every.append(whole(model.state_dict()))
    return every


@pytest.mark.slow
def test_adamw_at_full_rank() -> None:
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        plain_loss(model, ids(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for every in run_world(adamw, 4):
        for ours in every:
            assert_close(ours, model.state_dict(), **EXACT)


def compact_training(model: Any, **options: Any) -> GrassAdamW:
    grass.compact(model, **ROWS)
    return GrassAdamW(model, **OPTIONS, **options)


def parts(rank: int) -> dict[str, dict[str, Tensor]]:
    """The same batches whole, in micro-batches, and in halves by two replicas."""
    trained = {}
    for how, shape in (("whole", (1, 2, 2)), ("micro", (1, 2, 2)), ("replicas", (2, 2, 1))):
        if how != "replicas":
            mesh_ranks = (2, 2)
            model = on_grid(decoder(), *mesh_ranks)
        else:
            model = on_grid(decoder(), *shape)
        optimizer = compact_training(model)
        for step in range(3):
            optimizer.zero_grad()
            tokens = ids(step)
            batches = tokens.chunk(2) if how == "micro" else [tokens]
            if how == "replicas":
                batches = [tokens.chunk(2)[rank // 2]]
            for batch in batches:
                (model(input_ids=batch, labels=batch).loss / len(batches)).backward()
            optimizer.step()
        trained[how] = whole(model.state_dict())
    return trained


@pytest.mark.slow
def test_micro_batches_and_replicas() -> None:
    """A grid of 2 x 1 with two replicas selects as one of 2 x 2: both have two strata."""
    for trained in run_world(parts, 4):
        assert_close(trained["micro"], trained["whole"], **EXACT)
        assert_close(trained["replicas"], trained["whole"], **EXACT)


def saved(rank: int, folder: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], bool, list[str]]:
    """Train, save in the middle, go on; resume in a fresh model, go on: are they the same bits?"""
    model = on_grid(decoder(), 2, 2)
    optimizer = compact_training(model, **options)
    for step in range(3):
        train_step(model, optimizer, step)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    at_save = whole(weights)
    for step in range(3, 6):
        train_step(model, optimizer, step)
    resumed = on_grid(decoder(), 2, 2)
    again = compact_training(resumed, **options)
    load(resumed, again, folder)
    for step in range(3, 6):
        train_step(resumed, again, step)
    after, expected = whole(resumed.state_dict()), whole(model.state_dict())
    kinds = sorted({type(value).__name__ for value in weights.values()})
    return at_save, all(torch.equal(after[name], expected[name]) for name in expected), kinds


def load(model: Any, optimizer: GrassAdamW, folder: str) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def loaded(rank: int, folder: str, shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Load on other ranks: the weights, the selected columns of the first layer with their moments, a further step."""
    model = on_grid(decoder(), *shape) if shape else decoder()
    optimizer = compact_training(model, **options)
    load(model, optimizer, folder)
    weights = whole(model.state_dict())
    state = optimizer.state_dict()["state"][1]
    columns = whole({key: state[key] for key in ("indices", "exp_avg", "row_steps") if key in state})
    if shape:
        train_step(model, optimizer, 3)
    else:
        plain_loss(model, ids(3)).backward()
        optimizer.step()
    return weights, columns, whole(model.state_dict())


BANK = {"state_policy": "bank", "selection": "multinomial_norm"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param({}, id="keep"), pytest.param(BANK, id="bank", marks=pytest.mark.slow)]
)
def test_resumes_exactly_and_loads_on_other_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    ranks = run_world(saved, 4, str(tmp_path), options)
    for _, same, kinds in ranks:
        assert same
        assert kinds == ["DTensor"]
    weights = ranks[0][0]
    ((alone, columns, after),) = run_world(loaded, 1, str(tmp_path), (), options)
    assert_close(alone, weights, rtol=0.0, atol=0.0)
    assert not torch.equal(after["model.layers.0.mlp.up_proj.weight"], alone["model.layers.0.mlp.up_proj.weight"])
    if options:  # a bank stays on as many strata
        return
    for others, own_columns, _ in run_world(loaded, 4, str(tmp_path), (4, 1), options):
        assert_close(others, weights, rtol=0.0, atol=0.0)
        shared = [column for column in own_columns["indices"].tolist() if column in columns["indices"].tolist()]
        assert len(shared) >= len(columns["indices"]) // 2
        for column in shared:
            here, there = own_columns["indices"].tolist().index(column), columns["indices"].tolist().index(column)
            kept = own_columns["exp_avg"][:, here], columns["exp_avg"][:, there]
            torch.testing.assert_close(*kept, rtol=0.0, atol=0.0)
            assert own_columns["row_steps"][here] == columns["row_steps"][there]


def generated(rank: int) -> tuple[Tensor, Tensor, bool]:
    """Texts of three prompts, which two rows of ranks cannot share evenly, before and after conversion."""
    model = on_grid(decoder(), 2, 2).eval()
    prompts = ids(0)[:3]
    before = model.generate(prompts, max_new_tokens=5, do_sample=False)
    grass.compact(model, **ROWS)
    after = model.generate(prompts, max_new_tokens=5, do_sample=False)
    placed = all(isinstance(p, DTensor) for p in model.parameters())
    dist.barrier()
    return before, after, placed


@pytest.mark.slow
def test_generates_the_plain_models_text() -> None:
    expected = decoder().eval().generate(ids(0)[:3], max_new_tokens=5, do_sample=False)
    for before, after, placed in run_world(generated, 4):
        assert torch.equal(before, expected)
        assert torch.equal(after, expected)
        assert placed


def expanded(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Converted back in the middle of training."""
    model = on_grid(decoder(), 2, 2)
    optimizer = compact_training(model)
    train_step(model, optimizer, 0)
    before = whole(model.state_dict())
    grass.expand(model)
    after = whole(model.state_dict())
    loss = model(input_ids=ids(1), labels=labels_of(ids(1))).loss
    loss.backward()
    return before, after, float(loss.detach())


@pytest.mark.slow
def test_expand() -> None:
    for before, after, loss in run_world(expanded, 4):
        assert_close(after, before, rtol=0.0, atol=0.0)
        model = decoder()
        model.load_state_dict(after)
        assert loss == pytest.approx(float(plain_loss(model, ids(1)).detach()), rel=1e-12)
