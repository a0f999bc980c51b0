"""Pictures of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grass.extras import optional
from grass.sweep.journal import Journal

LEGEND = 12
"""Trials that a legend names at most."""


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
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
    axes.set_xlabel("rate of projected weights, lr * scale")
    axes.set_ylabel("held-out loss")
    axes.legend(title="all other weights")
    figure.savefig(path, dpi=150)


def plot_curves(files: Sequence[Path], path: Path) -> int:
    """Draw the losses of trials over their steps, from their journals. Returns how many there are.

    Trials that came to their end are drawn on top, the best of them thick; others are grey and end in a cross.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no journal has a loss.
    """
    optional("matplotlib", path.name)
    from matplotlib.figure import Figure

    journals = {file.stem.rpartition("-")[0]: Journal(file).read() for file in sorted(files)}
    drawn = {name: journal for name, journal in journals.items() if journal.losses}
    if not drawn:
        raise ValueError(f"No loss is in the journals {', '.join(map(str, files)) or '(none)'}")
    last = {name: next(reversed(journal.losses.values())) for name, journal in drawn.items()}
    done = {name for name, journal in drawn.items() if journal.events and journal.events[-1].get("end") == "done"}
    best = min(done, key=last.__getitem__, default=None)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in sorted(drawn, key=lambda name: (name in done, name == best)):
        steps, losses = list(drawn[name].losses), list(drawn[name].losses.values())
        if name in done:
            label = f"{name}: {last[name]:.4g}"
            axes.plot(steps, losses, marker=".", linewidth=3 if name == best else 1, label=label)
        else:
            axes.plot(steps, losses, color="0.7", linewidth=1)
            axes.plot(steps[-1:], losses[-1:], "x", color="0.5")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    handles, labels = axes.get_legend_handles_labels()
    shown = len(labels) if len(labels) <= LEGEND else 1  # the best one is drawn last
    if done:
        axes.legend(handles[-shown:], labels[-shown:], fontsize="small")
    figure.savefig(path, dpi=150)
    return len(drawn)


def _finished(row: dict[str, Any]) -> float:
    return float(row["loss"]) if row["end"] == "done" else math.nan
