"""Time ``step()`` per weight for many small ones, where Python costs more than arithmetic.

    python scripts/bench/small_weights.py --csv benchmarks/small_weights.csv

500 weights of 64 x 64, r = 16, no refresh. Grass runs with its defaults except for what the row names: dense mode
moves all 48 other columns, compact mode explores 16. All contestants step in turn in one run, one thread. ``us`` is the
median time per weight, ``least_us`` the least, ``python_us`` the median of what is spent outside the compiled kernel.
``uncompiled`` is Grass where there is no C++ compiler.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.cpu import kernel as cpu_kernel

SIDE, RANK, NEVER = 64, 16, 1_000_000_000
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    " explore=0": {"explore": 0},
    " bank": {"state_policy": "bank"},
    " uncompiled": {"fused": False},
}


def contestants(count: int) -> tuple[dict[str, Optimizer], list[nn.Module]]:
    """Optimizers with gradients in place, and the models that must stay alive."""
    models: list[nn.Module] = []

    def model() -> nn.Module:
        models.append(nn.ModuleList([nn.Linear(SIDE, SIDE, bias=False) for _ in range(count)]))
        return models[-1]

    racers: dict[str, Optimizer] = {
        "adamw foreach": AdamW(model().parameters(), foreach=True),
        "adamw fused": AdamW(model().parameters(), fused=True),
    }
    for name, changes in VARIANTS.items():
        options = {"update_interval": NEVER, **changes}
        racers[f"grass dense{name}"] = grass.GrassAdamW(model().parameters(), rank=RANK, **options)
        converted = model()
        grass.compact(converted, rank=RANK, explore=changes.get("explore"), targets="all-linear")
        racers[f"grass compact{name}"] = grass.GrassAdamW(converted, **options)
    for racer in racers.values():
        for group in racer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
    return racers, models


class Arithmetic:
    """The seconds spent in the compiled kernel since the last :meth:`take`."""

    def __init__(self) -> None:
        self.seconds, self.run = 0.0, cpu_kernel.Batch.run
        cpu_kernel.Batch.run = lambda batch, **numbers: self._timed(batch, numbers)

    def _timed(self, batch: cpu_kernel.Batch, numbers: dict[str, Any]) -> None:
        start = time.perf_counter()
        self.run(batch, **numbers)
        self.seconds += time.perf_counter() - start

    def take(self) -> float:
        """Read and reset."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--csv", type=Path, default=Path("runs/small_weights.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    racers, _models = contestants(args.count)
    arithmetic = Arithmetic()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in racers}
    for repeat in range(args.repeats + 2):
        for name, racer in racers.items():
            start = time.perf_counter()
            racer.step()
            whole, compiled = time.perf_counter() - start, arithmetic.take()
            if repeat >= 2:
                times[name].append((whole / args.count * 1e6, (whole - compiled) / args.count * 1e6))
    rows = []
    for name, both in times.items():
        whole, outside = zip(*both, strict=True)
        rows.append({"optimizer": name, "us": statistics.median(whole), "least_us": min(whole)})
        if name.startswith("grass") and "uncompiled" not in name:
            rows[-1]["python_us"] = statistics.median(outside)
    result = pd.DataFrame(rows)
    print(result.to_string(index=False, float_format="%.1f"))
    write(result, args.csv, count=args.count)


if __name__ == "__main__":
    main()
