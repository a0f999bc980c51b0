"""Time the step of one small converted model while many others are alive in the same process.

    python scripts/bench/many_models.py --csv benchmarks/many_models.csv    # about a minute
    python scripts/bench/many_models.py --others 5 --repeats 3              # seconds: checks that it runs

Each contestant is one model of 8 weights of 64 x 64. It is timed alone, then beside ``--others`` models of 8 converted
layers each, which have optimizers that have stepped once; then alone again, ``--rounds`` times in turn. ``step_us`` is
the median of all steps, ``times_alone`` that over the same contestant's alone. ``first_us`` is the median, over the
rounds, of the first step after the other models have come or gone, which may look at all of them.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser

SIDE, LAYERS, RANK = 64, 8, 8
Trained = tuple[nn.Module, Optimizer]


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))


def adamw() -> Trained:
    plain = model()
    return plain, AdamW(plain.parameters(), fused=True)


def dense() -> Trained:
    plain = model()
    return plain, grass.GrassAdamW(plain.parameters(), rank=RANK)


def compact() -> Trained:
    converted = model()
    grass.compact(converted, rank=RANK, targets="all-linear")
    return converted, grass.GrassAdamW(converted)


def attached() -> Trained:
    converted = model()
    grass.compact(converted, rank=RANK, targets="all-linear")
    optimizer = AdamW([p for p in converted.parameters() if p.requires_grad], fused=True)
    grass.attach(optimizer, converted)
    return converted, optimizer


CONTESTANTS: dict[str, Callable[[], Trained]] = {
    "adamw fused": adamw,
    "grass dense": dense,
    "grass compact": compact,
    "grass.attach(adamw fused)": attached,
}


def train(trained: Trained) -> float:
    """One training step; the seconds of ``optimizer.step()``."""
    network, optimizer = trained
    network(torch.ones(4, SIDE)).square().mean().backward()
    start = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - start
    optimizer.zero_grad()
    return seconds


def many(count: int) -> list[Trained]:
    """Converted models whose optimizers have stepped."""
    every = [compact() for _ in range(count)]
    for trained in every:
        train(trained)
    return every


def race(others: int, repeats: int, rounds: int) -> pd.DataFrame:
    """Time every contestant with and without the other models."""
    racers = {name: build() for name, build in CONTESTANTS.items()}
    for racer in racers.values():
        for _ in range(3):
            train(racer)
    first: dict[tuple[str, int], list[float]] = {(name, count): [] for count in (0, others) for name in racers}
    steps: dict[tuple[str, int], list[float]] = {key: [] for key in first}
    for _ in range(rounds):
        for count in (0, others):
            alive = many(count)
            for name, racer in racers.items():
                first[name, count].append(train(racer))
            for _ in range(repeats):
                for name, racer in racers.items():
                    steps[name, count].append(train(racer))
            del alive
            gc.collect()
    medians = {key: statistics.median(seconds) for key, seconds in steps.items()}
    return pd.DataFrame(
        {
            "optimizer": name,
            "other_models": count,
            "step_us": median * 1e6,
            "times_alone": median / medians[name, 0],
            "first_us": statistics.median(first[name, count]) * 1e6,
        }
        for (name, count), median in medians.items()
    )


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--others", type=int, default=200, help="other converted models")
    parser.add_argument("--repeats", type=int, default=101, help="steps of each contestant in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=Path("runs/many_models.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = race(args.others, args.repeats, args.rounds)
    print(result.to_string(index=False, float_format="%.2f"))
    write(result, args.csv, layers=LAYERS, rank=RANK)


if __name__ == "__main__":
    main()
