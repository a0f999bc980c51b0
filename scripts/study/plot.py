"""Plot the learning-rate sweeps and the loss curves of a study.

    python scripts/study/plot.py

``quality_lr.png`` has the sweeps, ``quality_curves.png`` the curves at the full horizon, ``quality_wide.png`` those of
the widest model. The left half of a picture of curves is at equal tokens. In its right half every method's tokens take
the time that `speed.csv`, or for the widest model `speed_wide.csv`, says. ``quality_frontier.png`` has the widest
model's losses against memory (`tracked_memory.csv`): above those of short runs on a CPU, below of long ones on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import matplotlib as mpl
import pandas as pd
from grid import CURVE_POINTS, load_grid
from results import CURVE, Results
from run import DIRECTORY
from tables import method_name, read_cells, step_seconds, study_rows

sys.path.append(str(Path(__file__).parents[1]))
from page_tables.methods import AtBest, by_method

from grass.command_line import ArgumentParser

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SWEEP, FINAL, WIDE = "learning rate", "final", ("width", "widest")
"""Names of the studies that are drawn as sweeps and as curves."""
WIDEST, ITS_RANK, ITS_STEPS = "28m-wide", 0.0625, "270"
"""The widest model, the rank of the compact mode that is drawn, and the horizon."""
LONG_STEPS = "2150"
"""The horizon of the frontier's lower half; the upper one has ``ITS_STEPS``."""
FRONTIER = {
    "AdamW": "AdamW",
    "8-bit AdamW": "8-bit AdamW",
    "GaLore": "GaLore",
    "APOLLO": "APOLLO",
    "Fira": "Fira",
    "Muon": "Muon",
    "Grass dense": "Grass, dense",
    "Muon compact, r = q = 1/4 n": "Muon, n/4",
    "Muon compact, r = q = 1/8 n": "Muon, n/8",
    **{f"Grass compact, r = q = 1/{part} n": f"Grass, n/{part}" for part in (4, 8, 16, 32)},
    "Grass compact, r = 1/8 n, q = 1/32 n, bf16, 8-bit moments": "Grass, recipe",
}
"""The methods that it shows, and their labels; AdamW has one rate."""
MARKERS = "osD^vP*"
"""Markers of its methods, in one color for those with compact gradients and one for the others."""
TICKS = ((20, 50, 100, 200, 400), (400, 500, 600, 700, 800))
"""Megabytes that its axes name."""


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="of grid.yaml, cells.csv and speed.csv")
    parser.add_argument("--out", type=Path, default=DIRECTORY.parents[1] / "docs" / "images", help="where plots go")
    args = parser.parse_args(argv)
    directory = args.directory
    args.out.mkdir(parents=True, exist_ok=True)
    mpl.use("Agg")
    rows, speed = read_cells(directory / "cells.csv"), pd.read_csv(directory / "speed.csv", index_col="method")
    grid = load_grid(directory / "grid.yaml", Results(directory / "cells.csv").losses())
    plot_sweeps(study_rows(grid.study(SWEEP), rows), args.out / "quality_lr.png")
    plot_curves(study_rows(grid.study(FINAL), rows), speed, args.out / "quality_curves.png")
    wide = directory / "speed_wide.csv"
    if wide.exists():
        cells = pd.concat([study_rows(grid.study(name), rows) for name in WIDE if name in grid.names])
        timed = pd.read_csv(wide, index_col="method").query("rank == @ITS_RANK")
        plot_curves(best_of_the_widest(cells, timed), timed, args.out / "quality_wide.png")
    gpu = directory.parent / "gpu" / "cells.csv"
    if gpu.exists():
        cells = {ITS_STEPS: rows, LONG_STEPS: read_cells(gpu)}
        plot_frontier(cells, pd.read_csv(directory / "tracked_memory.csv"), args.out / "quality_frontier.png")


def best_of_the_widest(cells: pd.DataFrame, speed: pd.DataFrame) -> pd.DataFrame:
    """The runs of each method that was timed on the widest model, at the rates that end lowest."""
    cells = cells[(cells["model"] == WIDEST) & (cells["steps"] == ITS_STEPS)].reset_index(drop=True)
    cells["method"] = [method_name(*row) for row in cells[["optimizer", "settings"]].itertuples(index=False)]
    other_rank = (cells["method"] == "grass compact") & ~cells["settings"].str.contains(f"rank={ITS_RANK}")
    cells = cells[cells["method"].str.removesuffix(", two rates").isin(speed.index) & ~other_rank]
    means = cells.groupby(["method", "settings"])[CURVE[-1]].mean()
    return cells[cells["settings"].isin({settings for _, settings in means.groupby("method").idxmin()})]


def plot_frontier(cells: Mapping[str, pd.DataFrame], tracked: pd.DataFrame, path: Path) -> None:
    """Loss against gradients and optimizer state, and against the tracked peak of a step with weights and activations.

    ``cells`` are by the horizon; each has a row of panels. A point is the mean of the seeds, its bar the lowest and the
    highest of them.
    """
    from matplotlib import pyplot as plt

    peaks = tracked[tracked["task"] == "pretrain"].set_index("method")["peak_mb"]
    figure, panels = plt.subplots(
        len(cells), 2, figsize=(13, 4.5 * len(cells)), sharex="col", sharey="row", layout="constrained", squeeze=False
    )
    for (steps, of), row in zip(cells.items(), panels, strict=True):
        of_the_widest = of[(of["model"] == WIDEST) & (of["steps"] == steps)]
        methods = by_method(of_the_widest.astype(str).to_dict("records"))
        for method in filter(methods.__contains__, FRONTIER):
            _draw_point(row[0], method, methods[method].megabytes, methods[method])
            if method in peaks:
                _draw_point(row[1], method, peaks[method], methods[method])
        row[0].set_ylabel(f"held-out loss after {int(steps):,} steps, nats per byte")
    shown = {
        label: point for axes in panels[:, 0] for point, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    named = [label for label in FRONTIER.values() if label in shown]
    figure.legend([shown[label] for label in named], named, loc="outside right center")
    labels = ("gradients and optimizer state, MB", "all memory of a step, MB")
    for axes, label, ticks in zip(panels[-1], labels, TICKS, strict=True):
        axes.set(xscale="log", xlabel=label)
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.set_xlim(ticks[0] * 0.8, ticks[-1] * 1.2)
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _draw_point(axes: Axes, method: str, megabytes: float, of: AtBest) -> None:
    losses, mean = of.losses, fmean(of.losses)
    kin = [other for other in FRONTIER if ("compact" in other) == ("compact" in method)]
    axes.errorbar(
        megabytes,
        mean,
        [[mean - min(losses)], [max(losses) - mean]],
        fmt=MARKERS[kin.index(method)],
        color="C0" if "compact" in method else "C1",
        mfc="none" if len(losses) == 1 else None,
        capsize=3,
        label=FRONTIER[method],
    )


def plot_sweeps(cells: pd.DataFrame, path: Path) -> None:
    """Final loss against the learning rate, one line per method: at each rate that of its best ``scale``."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    rates = cells["settings"].str.extract(r"lr=(\S+)", expand=False).astype(float)
    methods = [method_name(*row) for row in cells[["optimizer", "settings"]].itertuples(index=False)]
    for method, sweep in cells.assign(lr=rates, method=methods).groupby("method", sort=False):
        best = sweep.groupby("lr")[CURVE[-1]].min()
        axes.plot(best.index, best, "o-", label=method)
    axes.set(xscale="log", xlabel="learning rate", ylabel="held-out loss, nats per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def plot_curves(cells: pd.DataFrame, speed: pd.DataFrame, path: Path) -> None:
    """Held-out loss, mean of the seeds, against tokens and against measured step time."""
    from matplotlib import pyplot as plt

    figure, (by_tokens, by_time) = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for (method, settings), runs in cells.groupby(["optimizer", "settings"], sort=False):
        done = [(point + 1) / CURVE_POINTS for point in range(CURVE_POINTS)]
        losses = runs[list(CURVE)].mean()
        tokens, steps = runs["tokens"].iloc[0], int(runs["steps"].iloc[0])
        label = f"{method_name(method, settings)} ({losses.iloc[-1]:.3f}, {len(runs)} seeds)"
        by_tokens.plot([fraction * tokens / 1e6 for fraction in done], losses, "o-", label=label)
        seconds = steps * step_seconds(method, settings, speed)
        by_time.plot([fraction * seconds for fraction in done], losses, "o-", label=label)
    by_tokens.set(xlabel="million tokens", ylabel="held-out loss, nats per byte")
    by_time.set(xlabel="seconds of measured step time")
    by_tokens.legend()
    for axes in (by_tokens, by_time):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
