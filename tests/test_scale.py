"""``scale="auto"``: AdamW's learning rate times ``n / (r + q)`` for weights of which ``r + q`` of ``n`` rows move."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW
from tests.reference import gradients_for, run


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 9) -> dict[str, torch.Tensor]:
    for batch in torch.randn(steps, 6, 16, generator=torch.Generator().manual_seed(1)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def compact(rank: int | float, explore: int | float | None, scale: float | str | None, **options) -> dict:
    model = network()
    grass.compact(model, rank=rank, explore=explore, targets="all-linear")
    keywords = {} if scale is None else {"scale": scale}
    return trained(model, GrassAdamW(model, lr=1e-2, update_interval=4, **keywords, **options))


@pytest.mark.parametrize(("rank", "explore", "factor"), [(0.25, None, 2), (0.125, 0.125, 4), (0.125, 0.375, 2)])
def test_compact_mode_has_it_by_default(rank: float, explore: float | None, factor: float) -> None:
    by_default = compact(rank, explore, None)
    for scale in ("auto", factor):
        expected = compact(rank, explore, scale)
        assert all(torch.equal(value, expected[name]) for name, value in by_default.items())


def test_each_layer_has_its_own_where_counts_are_given() -> None:
    """Two columns of 16 and of 8: an update of one step is ``lr n / (r + q)`` long in the columns that move."""
    model = network()
    grass.compact(model, rank=1, explore=1, targets="all-linear")
    optimizer = GrassAdamW(model, lr=1e-3, weight_decay=0.0)
    before = {name: layer.weight.detach().clone() for name, layer in model.named_children() if name in ("0", "2")}
    model(torch.randn(6, 16)).square().mean().backward()
    chosen = {name: int(model.get_submodule(name).selected) for name in before}
    optimizer.step()
    for name, size in (("0", 16), ("2", 8)):
        moved = (model.get_submodule(name).weight - before[name])[:, chosen[name]].abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3 * size / 2), rtol=1e-3, atol=0)  # |Adam| is 1


@pytest.mark.parametrize(("rank", "explore"), [(0.25, 0), (1.0, 0)])
def test_one_without_explored_rows(rank: float, explore: int) -> None:
    by_default, expected = (compact(rank, explore, scale) for scale in (None, 1.0))
    assert all(torch.equal(value, expected[name]) for name, value in by_default.items())


@pytest.mark.parametrize(("explore", "factor"), [(1.0, 1.0), (4, 2.0), (0, 1.0)])
def test_dense_mode(explore: int | float, factor: float) -> None:
    """16 rows, of which 4 are selected: one where all move, 16 / 8 where 4 are explored."""
    weights = [nn.Parameter(torch.randn(16, 6))]
    copies = copy.deepcopy(weights)
    gradients = gradients_for(weights, 5)
    options = {"rank": 4, "dim": 0, "explore": explore, "lr": 1e-2}
    run(GrassAdamW(weights, **options), weights, gradients)
    run(GrassAdamW(copies, scale=factor, **options), copies, gradients)
    assert torch.equal(weights[0], copies[0])


def test_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="grass")
    model = network()
    grass.compact(model, rank=2, explore=2, targets="all-linear")
    GrassAdamW(model)
    assert "projected weights: lr x 2 to 4 (scale='auto')" in caplog.text
    caplog.clear()
    GrassAdamW(model, scale=1.0)
    GrassAdamW(network().parameters())
    assert "projected weights" not in caplog.text


@pytest.mark.parametrize("scale", ["Auto", 0, -1.0, float("nan"), None])
def test_bad_values(scale: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"scale=.*must be a finite number > 0, or 'auto'"):
        GrassAdamW([nn.Parameter(torch.zeros(4, 4))], scale=scale)
