"""What each sampling rule should draw, by enumeration, and how well draws agree with it."""

from __future__ import annotations

import itertools
from collections import Counter

import scipy.stats
import torch

from grass.selection.rules import select_rows

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
