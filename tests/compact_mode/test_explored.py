"""Explored columns in compact mode: dense mode's algorithm, without the gradient of the whole weight."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import grass
from grass import GrassAdamW
from grass.compact_mode import active_rows
from grass.selection import exploration
from grass.selection.exploration import draw_explored, draw_explored_of_each, resolve_explore
from tests.compact_mode.networks import (
    DIMS,
    PLAYED,
    Network,
    assert_same_weights,
    batches,
    compact_layers,
    loss_of,
    plain_copy,
    through_file,
    train,
)

NAMES = ("up", "mix", "down")
OPTIONS = dict(lr=1e-2, selection="uniform", state_policy="keep", update_interval=4)


def exploring(dtype: torch.dtype = torch.float32, dim: int = 1, explore: float = 4, seed: int = 0, **options) -> tuple:
    """A converted network, whose optimizer holds the active rows first, as the dense control holds the weights."""
    conversion = {key: options.pop(key) for key in ("weights", "active") if key in options}
    active = conversion.pop("active", None)
    model = Network(dtype, seed=seed)
    grass.compact(model, rank=3, explore=explore, dim=dim, dtype=active, seed=seed, **conversion)
    rows = [layer.active for layer in compact_layers(model).values()]
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not row for row in rows)]
    return model, GrassAdamW([{"params": rows}, {"params": rest}], **{**OPTIONS, **options})


def dense_control(model: nn.Module, explore: float, dim: int, **options) -> tuple[nn.Module, GrassAdamW]:
    dense = plain_copy(model)
    weights = [getattr(dense, name).weight for name in NAMES]
    rest = [p for p in dense.parameters() if all(p is not weight for weight in weights)]
    groups = [{"params": weights, "rank": 3, "explore": explore, "dim": dim}, {"params": rest}]
    return dense, GrassAdamW(groups, **{**OPTIONS, "selection": "playback", **options})


@pytest.mark.parametrize("explore", [2, 1.0], ids=["two", "all"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "options", [{}, dict(maximize=True), dict(weight_decay=0.5, scale=0.3), dict(decay="all")], ids=str
)
def test_equals_dense_mode(options: dict, dim: int, explore: float) -> None:
    """Fifteen steps across refreshes; dense mode, which chooses before a step, is given the same rows."""
    data = batches(15, dtype=torch.float64)
    model, optimizer = exploring(torch.float64, dim, explore, **options)
    for index, layer in enumerate(compact_layers(model).values()):
        count, size = len(layer.explored), layer.shape[dim]
        active_rows.explore(
            [layer], [draw_explored(layer.selected, size, count, 0, index, 0)]
        )  # as dense mode draws in its first step
    dense, control = dense_control(model, explore, dim, **options)
    played: list[Tensor] = []
    for step, batch in enumerate(data):
        if step % OPTIONS["update_interval"] == 0:
            played += [layer.selected.clone() for layer in compact_layers(model).values()]
        train(model, optimizer, [batch])
    PLAYED.append(iter(played))
    train(dense, control, data)
    assert next(PLAYED.pop(), None) is None
    for name in NAMES:
        # float64, with row step counts in float32
        torch.testing.assert_close(getattr(model, name).weight, getattr(dense, name).weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dim", DIMS)
def test_gradient_is_the_dense_one_and_its_norm_an_unbiased_estimate(dim: int) -> None:
    model = Network(torch.float64)
    dense, squares = copy.deepcopy(model), []
    grass.compact(model, rank=3, explore=4, dim=dim)
    batch = batches(1, dtype=torch.float64)[0]
    loss_of(dense, batch).backward()
    layer, weight = model.up, dense.up.weight
    others = [row for row in range(layer.shape[dim]) if row not in layer.selected]
    correction = math.sqrt(len(others) / 4)
    for draw in range(4000):
        active_rows.explore([layer], [draw_explored(layer.selected, layer.shape[dim], 4, 0, 0, draw)])
        if draw < 3:
            model.zero_grad()
            loss_of(model, batch).backward()
            expected = weight.grad.index_select(dim, layer.chosen)
            expected.narrow(dim, 3, 4).mul_(correction)
            torch.testing.assert_close(layer.active.grad, expected)
        rows = weight.grad.index_select(dim, layer.chosen)
        rows.narrow(dim, 3, 4).mul_(correction)
        squares.append(rows.square().sum())
    mean = torch.stack(squares).mean()
    error = 4 * torch.stack(squares).std() / math.sqrt(len(squares))  # four standard errors
    assert abs(mean - weight.grad.square().sum()) < error


@pytest.mark.parametrize("dim", DIMS)
def test_rows_that_are_neither_selected_nor_explored_stay(dim: int) -> None:
    model, optimizer = exploring(dim=dim, weight_decay=0.0)
    moved = torch.zeros(12, dtype=torch.bool) if dim else torch.zeros(20, dtype=torch.bool)
    before = model.up.weight.detach().clone()
    for batch in batches(3):
        moved[model.up.chosen] = True
        train(model, optimizer, [batch])
    differs = (model.up.weight.detach() != before).any(1 - dim)
    assert torch.equal(differs, moved)
    assert moved.sum() > 7


def test_micro_batches_explore_the_same_and_add_up() -> None:
    trained = []
    for micro in (1, 3):
        model, optimizer = exploring(torch.float64)
        train(model, optimizer, batches(7, dtype=torch.float64), micro=micro)
        trained.append(model)
    for ours, theirs in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
@pytest.mark.parametrize(
    "precision",
    [
        dict(),
        dict(dtype=torch.bfloat16, stochastic_rounding=True),
        dict(dtype=torch.bfloat16, active=torch.float32),
        dict(weights="int8"),
    ],
    ids=["float32", "bf16", "float32 over bf16", "int8"],
)
@pytest.mark.parametrize("dim", DIMS)
def test_resume_is_exact(dim: int, precision: dict, stop: int) -> None:
    data = batches(9, dtype=precision.get("dtype", torch.float32))
    ours = exploring(dim=dim, **precision)
    train(*ours, data[:stop])
    resumed = exploring(dim=dim, seed=3, **precision)
    resumed[0].load_state_dict(through_file(ours[0].state_dict()))
    resumed[1].load_state_dict(through_file(ours[1].state_dict()))
    for pair in (ours, resumed):
        train(*pair, data[stop:])
    assert_same_weights(resumed[0], ours[0])


@pytest.mark.parametrize("active", [None, torch.float32])
def test_small_moves_survive_half_precision(active: torch.dtype | None) -> None:
    """Moves of a tenth of the spacing of bfloat16 arrive in the mean."""
    moved = []
    for dtype, rows in ((torch.float32, None), (torch.bfloat16, active)):
        layer = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=dtype))
        with torch.no_grad():
            layer[0].weight.fill_(1.0)
        grass.compact(layer, rank=4, explore=16, dtype=rows, targets="all-linear")
        optimizer = GrassAdamW(layer, lr=2e-4, weight_decay=0.0, stochastic_rounding=dtype == torch.bfloat16)
        for _ in range(60):
            optimizer.zero_grad()
            layer(torch.ones(1, 64, dtype=dtype)).sum().backward()
            optimizer.step()
        selected = torch.zeros(64, dtype=torch.bool)
        selected[layer[0].selected] = True
        moved.append(1 - layer[0].weight.detach().float()[:, ~selected].mean())
    torch.testing.assert_close(moved[1], moved[0], rtol=0.1, atol=0)  # the mean of 3,840 entries


@pytest.mark.parametrize("dim", DIMS)
def test_clipping_and_loss_scaling_do_not_change_the_direction(dim: int) -> None:
    """A gradient clipped or scaled by a power of two moves everything as before, as with AdamW at eps = 0."""
    trained = []
    for limit in (math.inf, 0.5):
        model, optimizer = exploring(torch.float64, dim, eps=0.0)
        for batch in batches(1, dtype=torch.float64):
            loss_of(model, batch).backward()
            clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
        trained.append(model)
    for ours, theirs in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@given(size=st.integers(1, 40), data=st.data())
def test_draws_are_distinct_unselected_and_repeatable(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, size))
    count = data.draw(st.integers(0, size - rank))
    selected = torch.tensor(data.draw(st.permutations(range(size)))[:rank])
    drawn = draw_explored(selected, size, count, 5, 1, 9)
    assert len(set(drawn.tolist())) == count
    assert not set(drawn.tolist()) & set(selected.tolist())
    assert drawn.tolist() == sorted(drawn.tolist())
    assert torch.equal(drawn, draw_explored(selected, size, count, 5, 1, 9))
    everything = draw_explored(selected, size, size - rank, 5, 1, 9)
    assert everything.tolist() == sorted(set(range(size)) - set(selected.tolist()))


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
@pytest.mark.parametrize("experts", [1, 3])
@given(layers=st.integers(1, 9), rank=st.integers(1, 9), count=st.integers(1, 3))
def test_draws_of_several_layers_are_those_of_each(
    at_once: int, experts: int, layers: int, rank: int, count: int
) -> None:
    size, of_all = 12, experts * count
    selected = [
        torch.cat([torch.randperm(size)[:rank].sort().values + i * size for i in range(experts)]) for _ in range(layers)
    ]
    keys = [(3, layer, 5) for layer in range(layers)]
    expected = [
        draw_explored(own, experts * size, of_all, *key, experts) for own, key in zip(selected, keys, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exploration, "DRAWN_AT_ONCE", at_once)
        drawn = draw_explored_of_each(selected, experts * size, of_all, keys, experts)
    assert all(map(torch.equal, drawn, expected))
    assert len(drawn) == layers


def test_draws_differ_between_seeds_parameters_and_steps() -> None:
    selected = torch.arange(8)
    draws = {
        tuple(draw_explored(selected, 64, 8, *key).tolist()) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len(draws) == 4


@pytest.mark.parametrize("parameter", [0, *(pytest.param(p, marks=pytest.mark.slow) for p in (1, 77))])
@pytest.mark.parametrize("count", [1, 8, 20])
def test_draws_are_uniform_without_replacement(count: int, parameter: int) -> None:
    """How often a row, and a pair of rows, is drawn in 3,000 steps: a p-value below 0.001 fails, with fixed seeds."""
    others, steps = 32, 3000
    counts = torch.zeros(others, others, dtype=torch.float64)
    for step in range(steps):
        drawn = draw_explored(torch.arange(8), 8 + others, count, 0, parameter, step) - 8
        counts[drawn.unsqueeze(1), drawn] += 1
    share = count / others  # of the steps in which a row is drawn
    variance = (
        steps * share * (1 - share) * others / (others - 1)
    )  # rows of one draw are correlated by -1 / (others - 1)
    statistic = (counts.diagonal() - steps * share).square().sum() / variance
    assert stats.chi2.sf(statistic, others - 1) > 1e-3
    pairs = counts[*torch.triu_indices(others, others, 1)]
    expected = steps * share * (count - 1) / (others - 1)
    assert ((pairs - expected).abs() <= 5 * math.sqrt(expected)).all()  # five standard deviations, 496 pairs


@pytest.mark.parametrize(
    ("explore", "count"), [(None, 3), (0, 0), (0.0, 0), (1.0, 9), (0.5, 6), (5, 5), (1, 1), (0.01, 1), (0.9, 9)]
)
def test_counts_and_fractions(explore: float | None, count: int) -> None:
    assert resolve_explore(explore, 3, 12) == count
    model = Network()
    grass.compact(model, rank=3, explore=explore, targets=["up"])
    assert model.up.active.shape == (20, 3 + count)


@pytest.mark.parametrize("explore", [-1, 1.5, "all", True, 18])
def test_refused(explore: object) -> None:
    model = Network()
    with pytest.raises((ValueError, TypeError), match="Invalid explore="):
        grass.compact(model, rank=3, explore=explore)
    assert not compact_layers(model)
    with pytest.raises((ValueError, TypeError), match="Invalid explore="):
        GrassAdamW([nn.Parameter(torch.ones(4, 20))], rank=3, explore=explore)
