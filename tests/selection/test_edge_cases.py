"""Selection where the mathematics leaves a choice: ties, zeros, NaN, too few rows, bad arguments."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from grass.selection.rules import select_rows
from tests.selection.distributions import SIGNIFICANCE, draws, exact_outcomes, p_value, probabilities

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


def test_many_ties_go_to_the_lower_indices() -> None:
    """Enough rows for a sort that is not stable to show it."""
    norms = (torch.arange(5000) % 3).float()
    assert select_rows(norms, 1000).indices.tolist() == list(range(2, 3000, 3))


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
