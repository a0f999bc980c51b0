"""Tables of the quality study, from ``benchmarks/quality/cells.csv``."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from statistics import fmean

from page_tables.markdown import NAMES, table
from page_tables.source import BENCHMARKS, Row, read, select

sys.path.append(str(Path(__file__).parents[1] / "study"))
HORIZONS = {"540": "540 steps", "2150": "2,150 steps"}
KEY = ("task", "model", "steps", "seed", "optimizer", "settings")


METHODS = {
    "AdamW, two rates": "@two-rates",
    "Grass, dense mode, r = 1/4, all others move": "@dense",
    "Grass, compact mode, r = q = 1/4": "@compact-4",
    "Grass, compact mode, r = q = 1/8": "@compact-8",
    "AdamW, one rate": "@adamw",
    "GaLore, r = 1/4": "@galore",
    "APOLLO, r = 1/4": "@apollo",
}
"""The rows of the loss table: label and cells."""


def losses(method: str, steps: str) -> list[float]:
    """Final held-out losses, in the order of the seeds; none where nothing was run."""
    cells = sorted(select("cells.csv", method), key=lambda cell: int(cell["seed"]))
    return [float(cell["loss_100"]) for cell in cells if cell["steps"] == steps]


def shown(values: list[float]) -> str:
    """Mean and seeds."""
    if not values:
        return "not run"
    seeds = " ".join(f"{value:.3f}" for value in values)
    return f"**{fmean(values):.3f}** ({seeds})" if len(values) > 1 else f"{seeds} (one seed)"


def share(method: str, column: str) -> str:
    """Bytes of gradients or state as a share of AdamW's."""
    if method == "@two-rates":  # its CSV row has the indices of Grass at full rank besides
        return "1"
    first, base = (int(select("cells.csv", name)[0][column]) for name in (method, "@adamw"))
    return f"{first / base:.2f}"


def loss() -> str:
    """Loss, state and gradients of every method."""
    rows = []
    for label, method in METHODS.items():
        columns = [shown(losses(method, steps)) for steps in HORIZONS]
        rows.append([label, *columns, *(share(method, column) for column in ("state_bytes", "gradient_bytes"))])
    return table(["", *HORIZONS.values(), "state", "gradients"], rows)


@cache
def grid() -> dict[str, list[tuple[str, ...]]]:
    """The keys of the cells of each study, in order."""
    from grid import load_grid
    from results import Results

    directory = BENCHMARKS / "quality"
    loaded = load_grid(directory / "grid.yaml", Results(directory / "cells.csv").losses())
    return {name: [cell.key for cell in loaded.study(name).cells] for name in loaded.names}


def reach() -> str:
    """How far explored columns move: final losses by the factor, of trials that differ in it only."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in read("reach.csv"):
        names = "mode", "rank", "explore", "update_interval", "steps", "reach"
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    lines = []
    for (mode, rank, explore, interval, steps, factor), cells in sorted(groups.items()):
        values = {int(cell["seed"]): float(cell["loss_100"]) for cell in cells}
        seeds = " ".join(f"{values[seed]:.3f}" if seed in values else "-" for seed in range(3))
        mean = f"**{fmean(values.values()):.3f}**" if len(values) > 1 else ""
        options = f"`rank={rank} explore={explore} update_interval={interval}`"
        lines.append([mode, options, f"{int(steps):,}", factor, seeds, mean])
    return table(["mode", "options", "steps", "times as far", "loss by seed", "mean"], lines)


def study(name: str) -> str:
    """The cells of a study that have finished: what they ran with, the losses of their seeds, the mean.

    Settings that all of them share stand in the first row. ``A + B`` puts two studies into one table;
    ``prototypes`` are the cells that ran code of their commit.
    """
    by_key = {tuple(row[column] for column in KEY): row for row in read("cells.csv")}
    if name == "prototypes":
        rows = [row for row in by_key.values() if row["optimizer"] == "prototype"]
    else:
        keys = [key for part in name.split(" + ") for key in grid()[part]]
        rows = [by_key[key] for key in dict.fromkeys(keys) if key in by_key]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["steps"], row["optimizer"], row["settings"]), []).append(row)
    common = set.intersection(*(set(key[3].split()) for key in groups))
    several = [len({key[i] for key in groups}) > 1 for i in (0, 1)]
    accuracy = any(row["accuracy"] for row in rows)
    header = [f"all: {code(common)}" if common else "", "options", "loss by seed", "mean"]
    lines = []
    for (model, steps, optimizer, settings), cells in groups.items():
        where = [part for part, needed in zip((model, f"{int(steps):,} steps"), several, strict=True) if needed]
        name_shown = ", ".join([method_name(optimizer, settings), *where])
        options = [part for part in own_options(settings) if part not in common]
        values = [float(cell["loss_100"]) for cell in sorted(cells, key=lambda cell: int(cell["seed"]))]
        seeds = " ".join(f"{value:.3f}" for value in values)
        line = [name_shown, code(options), seeds, f"**{fmean(values):.3f}**" if len(values) > 1 else ""]
        if accuracy:
            line.append(f"{fmean(float(cell['accuracy']) for cell in cells):.1%}")
        lines.append(line)
    return table([*header, *(["accuracy"] if accuracy else [])], lines)


AS_ADAMW = {"rank=1.0", "update_interval=1000000", "selection=top_r", "dim=auto", "state_policy=reset", "explore=0"}
"""Settings that make Grass AdamW with two rates."""


def own_options(settings: str) -> list[str]:
    """Settings as words; of AdamW with two rates without those that make Grass at full rank AdamW."""
    words = settings.split()
    return [word for word in words if word not in AS_ADAMW] if "rank=1.0" in words else words


def code(settings: set[str] | list[str]) -> str:
    """Settings as code, in the order given, or sorted."""
    words = sorted(settings) if isinstance(settings, set) else settings
    return f"`{' '.join(words)}`" if words else ""


def method_name(optimizer: str, settings: str) -> str:
    """What a cell trains by."""
    if optimizer == "prototype":
        return "prototype"
    compact = "compact=True" in settings
    if optimizer != "grass":
        return NAMES.get(optimizer, optimizer.capitalize()) + (" compact" if compact else "")
    if "rank=1.0" in settings:
        return "AdamW, two rates"
    return f"Grass {'compact' if compact else 'dense'}"


def finals() -> str:
    """The full horizon: losses of each seed, and what each method holds."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in read("cells.csv"):
        of_full_batches = "batch_size" not in row["settings"]
        if of_full_batches and (row["task"], row["model"], row["steps"]) == ("pretrain", "1m", "2150"):
            groups.setdefault((row["optimizer"], row["settings"]), []).append(row)
    header = ["", "options", "loss by seed", "mean", "mean of 90% and 100%", "state bytes", "host bytes"]
    lines = []
    for (optimizer, settings), cells in sorted(groups.items(), key=lambda item: mean(item[1])):
        seeds = " ".join(f"{float(c['loss_100']):.3f}" for c in sorted(cells, key=lambda c: int(c["seed"])))
        both = fmean((float(c["loss_90"]) + float(c["loss_100"])) / 2 for c in cells)
        held = [f"{int(cells[0][name]):,}" for name in ("state_bytes", "host_bytes")]
        lines.append(
            [
                method_name(optimizer, settings),
                code(own_options(settings)),
                seeds,
                f"{mean(cells):.3f}",
                f"{both:.3f}",
                *held,
            ]
        )
    return table(header, lines)


def mean(cells: list[Row]) -> float:
    """Mean final loss."""
    return fmean(float(cell["loss_100"]) for cell in cells)
