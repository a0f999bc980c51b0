"""Time ``step()`` on the weight shapes of LLaMA against torch's fused AdamW, galore-torch and apollo-torch.

    python scripts/bench/optimizer_step.py                                  # 60m and 350m, some minutes
    python scripts/bench/optimizer_step.py --models 60m --repeats 3 --csv step.csv

All contestants step the same attention and MLP weights with the same gradients, in turn, ``--repeats`` times; the table
gives medians. A step that refreshes (new rows, new projection) is timed apart and spread over ``--interval`` steps.
Grass runs with its defaults except for what the row names. ``uncompiled`` is Grass where there is no C++ compiler.
``moved`` is what one ordinary step has to read and write: for rows with state, gradient, weight and both moments in,
weight and moments out (28 bytes per element); for explored rows of compact mode, gradient and values in, values and
weight out (16); for dense mode with all rows moving, the gradient twice and the weight in, the weight out (16 per
element of the weight, and 16 per element with state). ``floor`` is the time that takes at the bytes per second that
fused AdamW, a pure stream, reaches in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

from grass import GrassAdamW, compact
from grass.command_line import ArgumentParser
from grass.memory import state_bytes
from grass.memory.llama import LLAMA_SHAPES

NEVER = 1_000_000_000
Options = dict[str, Any]
DENSE: dict[str, Options] = {
    "default": {},
    "dim=0": {"dim": 0},
    "explore=0": {"explore": 0},
    "explore=0 dim=0": {"explore": 0, "dim": 0},
    "explore=0 dim=0 bank": {"explore": 0, "dim": 0, "state_policy": "bank"},
    "uncompiled": {"fused": False},
    "explore=0 uncompiled": {"explore": 0, "fused": False},
}
"""What differs from the defaults, by the end of the row's name."""
COMPACT: dict[str, tuple[Options, Options]] = {
    "default": ({}, {}),
    "dim=0": ({"dim": 0}, {}),
    "explore=0": ({"explore": 0}, {}),
    "uncompiled": ({}, {"fused": False}),
}
"""Likewise: of the conversion, and of the optimizer."""


@dataclass
class Contestant:
    """One optimizer in the race.

    Attributes:
        name: in the table.
        optimizer: with parameters and gradients in place.
        moved: bytes that its ordinary step has to read and write, per element of the weights.
        refresh: one step that chooses a new projection, where the method has any.
        model: what the parameters belong to, where the optimizer needs it alive.
    """

    name: str
    optimizer: torch.optim.Optimizer
    moved: float
    refresh: Callable[[], object] | None = None
    model: nn.Module | None = None


def llama_matrices(size: str) -> list[tuple[int, int]]:
    """Shapes of the attention and MLP weights of a LLaMA."""
    s = LLAMA_SHAPES[size]
    hidden, intermediate = s.hidden_size, s.intermediate_size
    layer = [(hidden, hidden)] * 4 + [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    return layer * s.num_hidden_layers


def contestants(shapes: list[tuple[int, int]], fraction: float, only: list[str]) -> Iterator[Contestant]:
    """Every contestant on parameters of its own that share memory with everybody else's, gradients too."""
    weights = [torch.randn(shape) * 0.02 for shape in shapes]
    grads = [torch.randn(shape) * 1e-3 for shape in shapes]

    def params() -> list[nn.Parameter]:
        made = [nn.Parameter(w) for w in weights]
        for p, g in zip(made, grads, strict=True):
            p.grad = g
        return made

    def wanted(name: str) -> bool:
        return not only or any(name.startswith(o) for o in only)

    yield Contestant("adamw fused", torch.optim.AdamW(params(), fused=True), 28.0)
    for name, options in DENSE.items():
        if wanted(name := f"grass dense {name}"):
            optimizer = GrassAdamW(params(), rank=fraction, update_interval=NEVER, **options)
            moved = 28 * fraction if options.get("explore") == 0 else 16 + 16 * fraction
            yield Contestant(name, optimizer, moved, lambda o=optimizer: grass_refresh(o))
    for name, (conversion, options) in COMPACT.items():
        if wanted(name := f"grass compact {name}"):
            model = nn.ModuleList([nn.Linear(n, m, bias=False) for m, n in shapes])
            optimizer = compact_optimizer(model, {"rank": fraction, **conversion}, options)
            moved = 28 * fraction if conversion.get("explore") == 0 else (28 + 16) * fraction
            yield Contestant(name, optimizer, moved, model=model)
    rank = int(min(shapes[0]) * fraction)
    if wanted("galore"):
        from galore_torch import GaLoreAdamW

        group = {"params": params(), "rank": rank, "update_proj_gap": NEVER, "scale": 0.25, "proj_type": "std"}
        yield Contestant("galore", peer := GaLoreAdamW([group], no_deprecation_warning=True), 28.0, peer.step)
    if wanted("apollo"):
        from apollo_torch import APOLLOAdamW

        group = {"params": params(), "rank": rank, "update_proj_gap": NEVER, "scale": 1.0, "proj_type": "std"}
        group |= {"proj": "random", "scale_type": "channel"}
        yield Contestant("apollo", peer := APOLLOAdamW([group]), 28.0, peer.step)


def compact_optimizer(model: nn.Module, conversion: Options, options: Options) -> GrassAdamW:
    """Grass over converted layers, whose step includes the write-back; their refresh is measured by train_step.py."""
    compact(model, targets="all-linear", **conversion)
    optimizer = GrassAdamW(model, update_interval=NEVER, **options)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p) * 1e-3
    return optimizer


def grass_refresh(optimizer: GrassAdamW) -> None:
    """One step that selects new rows."""
    for group in optimizer.param_groups:
        group["update_interval"] = 1
    optimizer.step()
    for group in optimizer.param_groups:
        group["update_interval"] = NEVER


def seconds(action: Callable[[], object]) -> float:
    """Wall-clock of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def race(racers: list[Contestant], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of an ordinary and of a refresh step of everybody, stepping in turn."""
    refresh = {}
    for r in racers:
        if not r.name.startswith(("galore", "apollo")):  # these project in their first step only, so it is timed
            r.optimizer.step()
        refresh[r.name] = seconds(r.refresh) if r.refresh else 0.0
        r.optimizer.step()
    ordinary: dict[str, list[float]] = {r.name: [] for r in racers}
    for _ in range(repeats):
        for r in racers:
            ordinary[r.name].append(seconds(r.optimizer.step))
    return {name: statistics.median(times) for name, times in ordinary.items()}, refresh


def table(size: str, racers: list[Contestant], repeats: int, interval: int) -> pd.DataFrame:
    """One row a contestant."""
    ordinary, refresh = race(racers, repeats)
    elements = sum(p.numel() for g in racers[0].optimizer.param_groups for p in g["params"])
    stream = 28 * elements / ordinary[racers[0].name]
    rows = []
    for r in racers:
        moved = r.moved * elements
        step, first = ordinary[r.name], refresh[r.name]
        amortised = step if r.refresh is None else (first + (interval - 1) * step) / interval
        rows.append(
            {
                "model": size,
                "optimizer": r.name,
                "step_ms": step * 1e3,
                "refresh_ms": first * 1e3,
                "amortised_ms": amortised * 1e3,
                "times_faster_than_adamw": ordinary[racers[0].name] / amortised,
                "moved_mb": moved / 1e6,
                "step_over_floor": step / (moved / stream),
                "state_mb": state_bytes(r.optimizer).device / 1e6,
            }
        )
    return pd.DataFrame(rows)


def parse() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--models", nargs="+", default=["60m", "350m"], choices=list(LLAMA_SHAPES))
    parser.add_argument("--only", nargs="*", default=[], help="names of contestants beside AdamW, by their beginning")
    parser.add_argument("--fraction", type=float, default=1 / 8, help="share of rows with state")
    parser.add_argument("--interval", type=int, default=200, help="steps between refreshes")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--csv", type=Path, default=Path("runs/optimizer_step.csv"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    tables = []
    for size in args.models:
        racers = list(contestants(llama_matrices(size), args.fraction, args.only))
        tables.append(table(size, racers, args.repeats, args.interval))
        print(tables[-1].to_string(index=False, float_format="%.2f"), flush=True)
    write(pd.concat(tables), args.csv)


if __name__ == "__main__":
    main()
