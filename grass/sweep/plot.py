"""Pictures of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grass.extras import optional


def plot_rates(table: Sequence[dict[str, Any]], best: dict[str, Any], path: Path) -> None:
    """Draw the loss against the rate of projected weights, ``lr * scale``, one line for each ``lr``.

    Runs that were stopped or diverged are crosses at the upper edge, the best run has a ring.

    Raises:
        ImportError: matplotlib is not installed.
    """
    optional("matplotlib", "lr.png")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    done = [row["loss"] for row in table if row["end"] == "done"]
    top = max(done) + 0.1 * (max(done) - min(done) or 1.0)
    for lr in sorted({row["lr"] for row in table}):
        rows = sorted((row for row in table if row["lr"] == lr), key=lambda row: row["scale"])
        rates = [lr * row["scale"] for row in rows]
        line = axes.plot(rates, [_finished(row) for row in rows], marker="o", label=f"lr={lr:.3g}")[0]
        stopped = [rate for rate, row in zip(rates, rows, strict=True) if row["end"] != "done"]
        axes.plot(stopped, [top] * len(stopped), "x", color=line.get_color())
    axes.plot([best["lr"] * best["scale"]], [best["loss"]], "o", markersize=14, fillstyle="none", color="black")
    axes.set_xscale("log", base=2)
    ticks = sorted({float(f"{row['lr'] * row['scale']:.3g}") for row in table})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("rate of projected weights, lr * scale")
    axes.set_ylabel("held-out loss")
    axes.legend(title="all other weights")
    figure.savefig(path, dpi=150)


def _finished(row: dict[str, Any]) -> float:
    return float(row["loss"]) if row["end"] == "done" else math.nan
