"""Training in compact mode, against dense mode and against torch's AdamW."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import PAPER, GrassAdamW
from tests.compact_mode.networks import (
    DIMS,
    PLAYED,
    POLICIES,
    Network,
    batches,
    compact_layers,
    converted,
    loss_of,
    plain_copy,
    selections,
    train,
)
from tests.reference import relative_difference
from tests.reference import train as train_llama


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest relative difference of any tensor of the two models' state."""
    expected = theirs.state_dict()
    return max(relative_difference(value, expected[name]) for name, value in ours.state_dict().items())


def record(model: nn.Module, optimizer: GrassAdamW, steps: Iterator[Callable[[], None]]) -> list[Tensor]:
    """Train, and list every selection in the order in which dense mode will ask for them."""
    played = []
    for number, step in enumerate(steps):
        if number % optimizer.param_groups[0]["update_interval"] == 0:
            played += [layer.selected.clone() for layer in compact_layers(model).values()]
        step()
    return played


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, data: list) -> Iterator[Callable[[], None]]:
    return ((lambda batch=batch: train(model, optimizer, [batch])) for batch in data)


@pytest.mark.parametrize("rule", ["top_r", "multinomial_norm"])
@pytest.mark.parametrize("dim", DIMS, ids=["rows", "columns"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    # In fp64 two orders of summation differ by 1e-16 a step; in fp32 by 1e-7, which Adam's normalisation enlarges.
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 2e-4)],
    ids=["fp64", "fp32"],
)
def test_equals_dense_mode(policy: str, dim: int, rule: str, dtype: torch.dtype, tolerance: float) -> None:
    """Fifty steps across seven refreshes, dense mode given the same rows."""
    options = dict(lr=1e-2, update_interval=7, state_policy=policy, warmup_after_refresh=3, weight_decay=0.1)
    data = batches(50, dtype=dtype)
    model, optimizer = converted(dtype, dim=dim, selection=rule, **options)
    dense = plain_copy(model)
    played = record(model, optimizer, steps_of(model, optimizer, data))
    assert len({tuple(rows.tolist()) for rows in played[::3]}) > 2, "refreshes change the selection"

    groups = grass.param_groups(dense, rank=3, dim=dim)
    PLAYED.append(iter(played))
    control = GrassAdamW(groups, selection="playback", explore=0, **options)
    losses = train(dense, control, data)
    assert next(PLAYED.pop(), None) is None, "dense mode asked for every selection"
    assert losses[-1] < losses[0]
    assert largest_difference(model, dense) < tolerance


@pytest.mark.parametrize(
    "options",
    [
        dict(decay="all", weight_decay=0.5),
        dict(decay="all", weight_decay=0.5, warmup_after_refresh=2, state_policy="keep"),
        dict(warmup_after_refresh=2, weight_decay=0.5, scale=0.3),
        dict(maximize=True, lr=torch.tensor(1e-2)),
        dict(scale=0.3, weight_decay=0.5),
        dict(betas=(0.0, 0.5), eps=0.1),
    ],
    ids=str,
)
def test_options_mean_what_they_mean_in_dense_mode(options: dict) -> None:
    data = batches(8, dtype=torch.float64)
    model, optimizer = converted(torch.float64, **{"update_interval": 3, **options})
    dense = plain_copy(model)
    PLAYED.append(iter(record(model, optimizer, steps_of(model, optimizer, data))))
    groups = grass.param_groups(dense, 3, dim=1)
    control = GrassAdamW(groups, **{**PAPER, "selection": "playback", "lr": 1e-2, "update_interval": 3, **options})
    train(dense, control, data)
    assert largest_difference(model, dense) < 1e-7  # a tensor as learning rate and per-row step counts are fp32


@pytest.mark.parametrize("dim", DIMS, ids=["rows", "columns"])
def test_all_rows_without_refresh_is_adamw(tiny_llama, token_batches, dim: int) -> None:
    hyper = dict(lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    model, plain = tiny_llama(), tiny_llama()
    grass.compact(model, rank=1.0, explore=0, dim=dim)
    train_llama(model, GrassAdamW(model, update_interval=1000, **hyper), token_batches)
    train_llama(plain, torch.optim.AdamW(plain.parameters(), **hyper), token_batches)
    # As in dense mode's parity tests, but backward multiplies matrices in another layout: ten times the rounding.
    assert largest_difference(model, plain) < 1e-5


@pytest.mark.parametrize("policy", ["keep", "bank"])
def test_all_rows_across_refreshes_is_adamw(policy: str) -> None:
    model, plain = Network(torch.float64), Network(torch.float64)
    grass.compact(model, rank=1.0, explore=0)
    train(model, GrassAdamW(model, lr=1e-2, update_interval=3, state_policy=policy), batches(20, dtype=torch.float64))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), batches(20, dtype=torch.float64))
    assert largest_difference(model, plain) < 1e-7  # per-row step counts, and what follows from them, are fp32


@pytest.mark.parametrize("refresh", ["sketch", "exact"])
@pytest.mark.parametrize("dim", DIMS, ids=["rows", "columns"])
def test_micro_batches(dim: int, refresh: str) -> None:
    """Accumulated over three parts: the same weights and the same selections, which rest on the accumulated sketch."""
    runs = []
    for micro in (1, 3):
        model, optimizer = converted(torch.float64, dim=dim, refresh=refresh, sketch_size=4)
        chosen = []
        for batch in batches(13, dtype=torch.float64):
            train(model, optimizer, [batch], micro)
            chosen.append(selections(model))
        runs.append((model, chosen))
    (one, chosen_at_once), (parts, chosen_in_parts) = runs
    assert chosen_in_parts == chosen_at_once
    assert len({str(rows) for rows in chosen_at_once}) == 4
    assert largest_difference(parts, one) < 1e-11


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping(foreach: bool) -> None:
    """The norm is that of the compact gradients and of the plain parameters' together."""
    model, optimizer = converted()
    loss_of(model, batches(1)[0]).backward()
    dense = plain_copy(model)
    loss_of(dense, batches(1)[0]).backward()
    expected = [p.grad for name, p in dense.named_parameters() if not name.endswith("weight") or "norm" in name]
    for name, layer in compact_layers(model).items():
        expected.append(dense.get_submodule(name).weight.grad.index_select(1, layer.selected))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in expected]).norm())
    clipped = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-3, atol=0)
    optimizer.step()


def test_eval_and_no_grad_leave_nothing_behind() -> None:
    """Not even in a step that gathers the sketch."""
    model, optimizer = converted(update_interval=1)
    (x, _), plain, state = batches(1)[0], plain_copy(model), copy.deepcopy(model.state_dict())
    model.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)  # weights in another memory layout
    assert all(layer.sketch.grad is None for layer in compact_layers(model).values())
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_every_interval_is_counted_per_layer() -> None:
    """A layer that gets no gradient does not age; the others go on."""
    model, optimizer = converted()
    model.down.active.requires_grad_(False)
    for _ in itertools.repeat(None, 6):
        train(model, optimizer, batches(1))
    assert optimizer.state[model.up.active]["step"] == 6
    assert model.down.active not in optimizer.state
