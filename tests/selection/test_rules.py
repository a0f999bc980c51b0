"""The selection rules: distributions, optimality, registration, purity."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grass
from grass.selection.rules import Selection, available_rules, register_rule, sampled, select_rows
from tests.reference import dense_projection
from tests.selection.distributions import NORMS, SAMPLERS, SIGNIFICANCE, draws, exact_outcomes, p_value, probabilities


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("rule", SAMPLERS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_distribution_is_exact(rule: str, replacement: bool, rank: int) -> None:
    expected = exact_outcomes(probabilities(rule, NORMS), rank, replacement)
    observed = draws(rule, NORMS, rank, replacement, 3000)
    assert set(observed) <= set(expected)
    assert p_value(observed, expected) > SIGNIFICANCE


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_the_chi_square_can_tell_the_rules_apart(replacement: bool) -> None:
    observed = draws("multinomial_norm", NORMS, 2, replacement, 3000)
    for rule in ("multinomial_norm_sq", "uniform"):
        expected = {**dict.fromkeys(observed, 1e-9), **exact_outcomes(probabilities(rule, NORMS), 2, replacement)}
        assert p_value(observed, {k: v / sum(expected.values()) for k, v in expected.items()}) < 1e-6


@pytest.mark.parametrize("rule", SAMPLERS)
def test_inclusion_without_replacement(rule: str) -> None:
    """First-order inclusion probabilities, the quantity a convergence argument uses."""
    rank, count = 2, 3000
    exact = [0.0] * len(NORMS)
    for rows, probability in exact_outcomes(probabilities(rule, NORMS), rank, replacement=False).items():
        for row in rows:
            exact[row] += probability
    observed = [0] * len(NORMS)
    for rows, times in draws(rule, NORMS, rank, False, count).items():
        for row in rows:
            observed[row] += times
    for inclusion, times in zip(exact, observed, strict=True):
        assert abs(times - count * inclusion) <= 5 * math.sqrt(count * inclusion * (1 - inclusion)) + 1e-9


@pytest.mark.parametrize("rule", SAMPLERS)
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_scale_with_replacement(rule: str, rank: int) -> None:
    selection = select_rows(torch.tensor(NORMS), rank, rule, torch.Generator().manual_seed(3), replacement=True)
    q = probabilities(rule, NORMS)
    expected = torch.tensor([1 / math.sqrt(rank * q[row]) for row in selection.indices.tolist()])
    torch.testing.assert_close(selection.scale, expected, rtol=1e-6, atol=0)  # one rounding to float32


@pytest.mark.parametrize("rule", SAMPLERS)
def test_unbiased_with_replacement(rule: str) -> None:
    """The mean over draws of ``P P^T G`` is ``G``, within five standard errors of each entry."""
    gradient = torch.randn(6, 3, dtype=torch.float64) * torch.tensor([3, 1, 0.2, 2, 0.7, 1])[:, None]
    generator = torch.Generator().manual_seed(11)
    estimates = []
    for _ in range(3000):
        selection = select_rows(gradient.norm(dim=1), 3, rule, generator, replacement=True)
        p = dense_projection(selection.indices, selection.scale, 6)
        estimates.append(p @ p.T @ gradient)
    stacked = torch.stack(estimates)
    error = (stacked.mean(0) - gradient).abs() / (stacked.std(0) / math.sqrt(len(estimates)))
    assert error.max() < 5


@pytest.mark.parametrize("rank", range(1, 8))
def test_top_r_is_optimal(rank: int) -> None:
    """No other choice of rows leaves a smaller ``||G - P P^T G||_F``."""
    gradient = torch.randn(7, 4, dtype=torch.float64)
    gradient[[2, 5]] = gradient[5].clone()  # a tie must not break it

    def residual(rows: tuple[int, ...]) -> float:
        p = dense_projection(torch.tensor(rows), None, 7)
        return float((gradient - p @ p.T @ gradient).norm())

    selection = select_rows(gradient.norm(dim=1), rank)
    best = min(residual(rows) for rows in itertools.combinations(range(7), rank))
    assert residual(tuple(selection.indices.tolist())) == pytest.approx(best, rel=1e-12, abs=1e-12)


def test_registered_rules() -> None:
    register_rule(
        "test_last_rows", lambda norms, rank, *_: Selection(torch.arange(len(norms) - rank, len(norms)), None)
    )
    register_rule("test_fourth_root", sampled(lambda norms: norms**0.25))
    assert {"top_r", *SAMPLERS, "test_last_rows", "test_fourth_root"} <= set(available_rules())
    assert select_rows(torch.ones(5), 2, "test_last_rows").indices.tolist() == [3, 4]
    observed = draws("test_fourth_root", NORMS, 2, False, 3000)
    weights = [x**0.25 for x in NORMS]
    assert p_value(observed, exact_outcomes([w / sum(weights) for w in weights], 2, False)) > SIGNIFICANCE
    parameter = torch.nn.Parameter(torch.ones(5, 9))
    parameter.grad = torch.ones_like(parameter)
    optimizer = grass.GrassAdamW([parameter], rank=2, dim=0, selection="test_last_rows")
    optimizer.step()
    assert optimizer.state[parameter]["indices"].tolist() == [3, 4]


def test_a_rule_gets_clean_norms() -> None:
    received = []

    def rule(norms: torch.Tensor, rank: int, *_: object) -> Selection:
        received.append(norms)
        return Selection(torch.arange(rank), None)

    register_rule("test_spy", rule)
    select_rows(torch.tensor([1, math.nan, math.inf, 2], dtype=torch.bfloat16), 2, "test_spy")
    assert received[0].dtype == torch.float64
    assert received[0].tolist() == [1, 0, 0, 2]


NORM_VALUES = st.floats(0, 2.0**100, width=32) | st.sampled_from([0.0, math.nan, math.inf])


@given(
    norms=st.lists(
        st.floats(0, 2.0**100, width=32) | st.sampled_from([0.0, math.nan, math.inf]), min_size=1, max_size=30
    ),
    rank=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    choice=st.sampled_from([("top_r", False), *itertools.product(SAMPLERS, [False, True])]),
)
def test_pure_and_well_formed(norms: list[float], rank: int, seed: int, choice: tuple[str, bool]) -> None:
    rule, replacement = choice
    rank = min(rank, len(norms))
    tensor = torch.tensor(norms, dtype=torch.float32)
    before, global_state = tensor.clone(), torch.get_rng_state()

    def select() -> Selection:
        return select_rows(tensor, rank, rule, torch.Generator().manual_seed(seed), replacement=replacement)

    first, again = select(), select()
    assert torch.equal(first.indices, again.indices)
    assert torch.equal(tensor.nan_to_num(-1), before.nan_to_num(-1))
    assert torch.equal(torch.get_rng_state(), global_state)
    indices = first.indices.tolist()
    assert first.indices.dtype == torch.int64
    assert indices == sorted(indices)
    assert len(indices) == rank
    assert 0 <= indices[0] <= indices[-1] < len(norms)
    assert replacement or len(set(indices)) == rank
    if not replacement:
        assert first.scale is None
        finite_nonzero = [i for i, x in enumerate(tensor.tolist()) if math.isfinite(x) and x > 0]
        if rule != "uniform" and len(finite_nonzero) >= rank:
            assert set(indices) <= set(finite_nonzero)
    else:
        assert first.scale.dtype == torch.float32
        assert first.scale.shape == (rank,)
        assert bool(torch.isfinite(first.scale).all())


@pytest.mark.parametrize("rule", SAMPLERS)
def test_generator_seeds_matter(rule: str) -> None:
    outcomes = {
        tuple(select_rows(torch.ones(20), 5, rule, torch.Generator().manual_seed(seed)).indices.tolist())
        for seed in range(10)
    }
    assert len(outcomes) > 5


@given(st.integers(1, 40), st.data())
def test_balanced_rows_take_turns(size: int, data: st.DataObject) -> None:
    """In one order of the rows, no two turns have a row in common; fewer than ``rank`` rows have no turn."""
    rank, seed = data.draw(st.integers(1, size)), data.draw(st.integers(0, 99))
    every = [
        select_rows(torch.ones(size), rank, "balanced", torch.Generator().manual_seed(seed), turn=turn).indices
        for turn in range(size // rank)
    ]
    assert all(torch.equal(rows, rows.sort().values) for rows in every)
    assert torch.cat(every).unique().numel() == size // rank * rank


def balanced(weight: torch.nn.Parameter) -> grass.GrassAdamW:
    return grass.GrassAdamW([{"params": [weight], "rank": 3}], selection="balanced", update_interval=2, lr=0.1)


def selections_of(weight: torch.nn.Parameter, optimizer: grass.GrassAdamW, refreshes: int) -> list[list[int]]:
    chosen = []
    for _ in range(refreshes):
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        chosen.append(optimizer.state[weight]["indices"].tolist())
    return chosen


def test_every_column_has_its_turn_also_in_a_resumed_run() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 12))
    optimizer = balanced(weight)
    first = selections_of(weight, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    rest = selections_of(weight, optimizer, 5)
    other = torch.nn.Parameter(weight.detach().clone())
    resumed = balanced(other)
    resumed.load_state_dict(saved)
    assert selections_of(other, resumed, 5) == rest
    every = [*first, *rest]
    for cycle in (every[:4], every[4:]):
        assert sorted(itertools.chain.from_iterable(cycle)) == list(range(12))
    assert every[:4] != every[4:]


def test_balanced_rows_are_not_drawn_with_replacement() -> None:
    with pytest.raises(ValueError, match="selection='balanced' takes replacement=False"):
        grass.GrassAdamW([torch.nn.Parameter(torch.ones(4, 4))], rank=2, selection="balanced", replacement=True)
