"""The selection rules: distributions, optimality, edge cases, purity."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

import grass
from grass.selection import Selection, available_rules, register_rule, sampled, select_rows
from tests.reference import dense_projection

SAMPLERS = ["multinomial_norm", "multinomial_norm_sq", "uniform"]
NORMS = [4.0, 1.0, 0.0, 2.5, 0.5]
WEIGHTS = {"multinomial_norm": lambda x: x, "multinomial_norm_sq": lambda x: x * x, "uniform": lambda x: 1.0}
# The seeds are fixed, so a p-value this small means a wrong distribution, and a right one never flakes.
SIGNIFICANCE = 1e-4


def probabilities(rule: str, norms: list[float]) -> list[float]:
    weights = [WEIGHTS[rule](x) for x in norms]
    return [w / sum(weights) for w in weights]


def exact_outcomes(q: list[float], rank: int, replacement: bool) -> dict[tuple[int, ...], float]:
    """Probability of every outcome, its rows ascending, by enumerating all orders in which rows can be drawn."""
    outcomes: Counter[tuple[int, ...]] = Counter()
    for order in itertools.product(range(len(q)), repeat=rank):
        if not replacement and len(set(order)) < rank:
            continue
        probability, left = 1.0, 1.0
        for row in order:
            probability *= q[row] / left
            left -= 0.0 if replacement else q[row]
        outcomes[tuple(sorted(order))] += probability
    return {rows: p for rows, p in outcomes.items() if p > 0}


def draws(rule: str, norms: list[float], rank: int, replacement: bool, count: int) -> Counter[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    tensor = torch.tensor(norms)
    return Counter(
        tuple(select_rows(tensor, rank, rule, generator, replacement=replacement).indices.tolist())
        for _ in range(count)
    )


def p_value(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    count = sum(observed.values())
    frequent = [
        rows for rows, p in expected.items() if p * count >= 5
    ]  # chi-square's own condition; the rest is pooled
    seen, wanted = [observed[rows] for rows in frequent], [expected[rows] * count for rows in frequent]
    if len(frequent) < len(expected):
        seen, wanted = [*seen, count - sum(seen)], [*wanted, count - sum(wanted)]
    return float(scipy.stats.chisquare(seen, wanted).pvalue)


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


NAN, INF = math.nan, math.inf
TOP_R_CASES = {
    "ordinary": ([1, 3, 2, 5], 2, [1, 3]),
    "tie goes to the lower index": ([1, 2, 2, 2], 2, [1, 2]),
    "all tied": ([3, 3, 3, 3], 3, [0, 1, 2]),
    "all zero takes the first": ([0, 0, 0, 0], 2, [0, 1]),
    "fewer nonzero than rank": ([0, 0, 7, 0], 2, [0, 2]),
    "nan is not preferred": ([NAN, 1, 2], 2, [1, 2]),
    "inf is not preferred": ([1, INF, 2, -INF], 2, [0, 2]),
    "nan ties with zero": ([0, NAN, 0, 1], 2, [0, 3]),
    "every row": ([2, 1, 3], 3, [0, 1, 2]),
    "one row": ([5], 1, [0]),
}


@pytest.mark.parametrize(("norms", "rank", "expected"), TOP_R_CASES.values(), ids=TOP_R_CASES.keys())
def test_top_r_edge_cases(norms: list[float], rank: int, expected: list[int]) -> None:
    selection = select_rows(torch.tensor(norms, dtype=torch.float32), rank)
    assert selection.indices.tolist() == expected
    assert selection.scale is None


SAMPLING_CASES = {
    "all zero": [0, 0, 0, 0, 0],
    "one nonzero": [0, 0, 3, 0, 0],
    "nan and inf count as zero": [NAN, 2, INF, 0, 1],
    "all nan": [NAN] * 5,
}


@pytest.mark.parametrize("norms", SAMPLING_CASES.values(), ids=SAMPLING_CASES.keys())
@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("rule", ["multinomial_norm", "multinomial_norm_sq"])
def test_sampling_edge_cases(rule: str, replacement: bool, norms: list[float]) -> None:
    """With the zeros of a degenerate gradient the outcome still has a defined distribution; here it is, exactly."""
    rank = 3
    clean = [x if math.isfinite(x) else 0.0 for x in norms]
    nonzero = tuple(i for i, x in enumerate(clean) if x)
    if not nonzero:
        expected = exact_outcomes([0.2] * 5, rank, replacement)
    elif replacement or len(nonzero) >= rank:
        expected = exact_outcomes(probabilities(rule, clean), rank, replacement)
    else:
        zeros = [i for i, x in enumerate(clean) if not x]
        fillings = list(itertools.combinations(zeros, rank - len(nonzero)))
        expected = {tuple(sorted(nonzero + filling)): 1 / len(fillings) for filling in fillings}
    observed = draws(rule, norms, rank, replacement, 2000)
    assert set(observed) <= set(expected)
    if len(expected) > 1:
        assert p_value(observed, expected) > SIGNIFICANCE


ERRORS = {
    "matrix of norms": (dict(norms=torch.ones(2, 2), rank=1), r"\(2, 2\)"),
    "rank zero": (dict(norms=torch.ones(3), rank=0), r"rank=0.*3"),
    "rank too large": (dict(norms=torch.ones(3), rank=4), r"rank=4.*3"),
    "rank too large with replacement": (
        dict(norms=torch.ones(3), rank=4, rule="uniform", replacement=True),
        r"rank=4.*3",
    ),
    "unknown rule": (dict(norms=torch.ones(3), rank=1, rule="best"), r"best.*top_r.*uniform"),
    "top_r with replacement": (dict(norms=torch.ones(3), rank=1, replacement=True), "top_r.*replacement"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_rows(**arguments)


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
    optimizer = grass.GrassAdamW([parameter], rank=2, selection="test_last_rows")
    optimizer.step()
    assert optimizer.state[parameter]["indices"].tolist() == [3, 4]


def test_a_rule_gets_clean_norms() -> None:
    received = []

    def rule(norms: torch.Tensor, rank: int, *_: object) -> Selection:
        received.append(norms)
        return Selection(torch.arange(rank), None)

    register_rule("test_spy", rule)
    select_rows(torch.tensor([1, NAN, INF, 2], dtype=torch.bfloat16), 2, "test_spy")
    assert received[0].dtype == torch.float64
    assert received[0].tolist() == [1, 0, 0, 2]


@given(
    norms=st.lists(st.floats(0, 2.0**100, width=32) | st.sampled_from([0.0, NAN, INF]), min_size=1, max_size=30),
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
