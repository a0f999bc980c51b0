"""Would early stopping have kept the best learning rates? A replay on the recorded sweeps of the quality study.

    python scripts/bench/sweep_stopping.py --csv benchmarks/sweep_stopping.csv    # seconds

A sweep is a set of at least four runs in ``benchmarks/quality/cells.csv`` that differ in their learning rates only.
Each has ten losses. Runs are replayed one after another, in ``--orders`` random orders. ``halving`` is asynchronous
successive halving (ASHA, Li et al., 2020, arXiv 1810.05934): a run goes on at 20% and at 50% of its steps if it is in
the better half of the runs that have come so far. ``behind`` is :class:`grass.sweep.Behind`. ``share`` is the share of
all steps that were taken, ``kept`` how often the best run came to its end, ``regret`` how much higher the least final
loss is, on average.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

from grass.command_line import ArgumentParser
from grass.sweep import Behind

CELLS = Path(__file__).parents[2] / "benchmarks" / "quality" / "cells.csv"
POINTS = 10
LOSSES = [f"loss_{100 * i // POINTS}" for i in range(1, POINTS + 1)]
FEWEST = 4

Curve = list[float]
Rule = Callable[[int, Curve, list[Curve]], bool]
"""Whether to stop a run after so many points, given its curve and those of the runs before it, as far as they came."""


def sweeps() -> list[list[Curve]]:
    """The curves of every recorded sweep."""
    cells = pd.read_csv(CELLS).dropna(subset=LOSSES)
    others = cells["settings"].str.replace(r"\b(lr|scale)=\S+ ?", "", regex=True).str.strip()
    keys = [*(cells[name] for name in ("task", "model", "steps", "seed", "optimizer")), others]
    return [found[LOSSES].to_numpy().tolist() for _, found in cells.groupby(keys) if len(found) >= FEWEST]


def halving(points: int, curve: Curve, before: list[Curve]) -> bool:
    if points not in (POINTS // 5, POINTS // 2):
        return False
    reached = [other[points - 1] for other in before if len(other) >= points]
    better = sum(loss < curve[points - 1] for loss in reached)
    return better >= max(1, (len(reached) + 1) // 2)


def behind(points: int, curve: Curve, before: list[Curve], *, rule: Behind) -> bool:
    return rule(points, POINTS, curve[points - 1], [other[points - 1] for other in before if len(other) >= points])


def replay(curves: list[Curve], rule: Rule | None) -> tuple[float, bool, float]:
    """Share of the steps, whether the best run came to its end, and regret."""
    before: list[Curve] = []
    for curve in curves:
        end = next((n for n in range(1, POINTS) if rule and rule(n, curve, before)), POINTS)
        before.append(curve[:end])
    best, found = min(curve[-1] for curve in curves), min(run[-1] for run in before if len(run) == POINTS)
    return sum(map(len, before)) / POINTS / len(curves), found == best, found - best


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--orders", type=int, default=50, help="random orders of each sweep")
    parser.add_argument("--csv", type=Path, default=Path("runs/sweep_stopping.csv"))
    args = parser.parse_args()
    rules: dict[str, Rule | None] = {"none": None, "halving": halving}
    rules |= {f"behind {m}": partial(behind, rule=Behind(m, after=0.3)) for m in (0.02, 0.05, 0.1)}
    recorded, rows = sweeps(), []
    for name, rule in rules.items():
        rng = random.Random(0)
        found = [replay(rng.sample(curves, len(curves)), rule) for curves in recorded for _ in range(args.orders)]
        share, kept, regret = (fmean(column) for column in zip(*found, strict=True))
        rows.append({"rule": name, "share": share, "kept": kept, "regret": regret})
    result = pd.DataFrame(rows)
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, sweeps=len(recorded), orders=args.orders)


if __name__ == "__main__":
    main()
