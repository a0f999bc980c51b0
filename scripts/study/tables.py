"""Print what a study found as Markdown: a table for each name in the grid, of the cells that have finished.

python scripts/study/tables.py                 # all
python scripts/study/tables.py --study final   # one
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pandas as pd
from grid import Study, load_grid
from results import CURVE, KEY, Results
from run import DIRECTORY

from grass import GrassAdamW
from grass.command_line import ArgumentParser

DEFAULT_INTERVAL = inspect.signature(GrassAdamW).parameters["update_interval"].default


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--grid", type=Path, default=DIRECTORY / "grid.yaml")
    parser.add_argument("--results", type=Path, default=DIRECTORY / "cells.csv")
    parser.add_argument("--study", help="its name; default: all")
    args = parser.parse_args(argv)
    rows = read_cells(args.results)
    grid = load_grid(args.grid, Results(args.results).losses())
    for name in [args.study] if args.study else grid.names:
        print(f"\n### {name}\n\n{markdown(seed_means(study_rows(grid.study(name), rows)))}")


def read_cells(path: Path) -> pd.DataFrame:
    """The finished cells; settings as the empty string where they are the defaults."""
    missing = {"accuracy": ["", "nan"]} | {name: ["nan"] for name in CURVE}
    return pd.read_csv(path, dtype=dict.fromkeys(KEY, str), keep_default_na=False, na_values=missing)


def study_rows(study: Study, rows: pd.DataFrame) -> pd.DataFrame:
    """Those of the study's cells that have a row, in its order."""
    order = {cell.key: position for position, cell in enumerate(study.cells)}
    places = [order.get(key) for key in rows[list(KEY)].itertuples(index=False, name=None)]
    return rows.assign(place=places).dropna(subset="place").sort_values("place")


def seed_means(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per setting: mean and standard deviation over seeds of the final loss, and what it held.

    The mean accuracy has a column where any row has one.
    """
    grouped = rows.groupby(["task", "model", "steps", "optimizer", "settings"], sort=False)
    means = grouped.agg(
        seeds=("seed", "count"),
        loss=(CURVE[-1], "mean"),
        deviation=(CURVE[-1], "std"),
        accuracy=("accuracy", "mean"),
        tokens=("tokens", "first"),
        state_bytes=("state_bytes", "first"),
        host_bytes=("host_bytes", "first"),
    ).reset_index()
    return means if means["accuracy"].notna().any() else means.drop(columns="accuracy")


def method_name(optimizer: str, settings: str) -> str:
    """What a cell trains by: Grass by its mode, at full rank AdamW with a learning rate of its own for the body."""
    values = dict(setting.split("=", 1) for setting in settings.split())
    if optimizer != "grass":
        return optimizer
    if values.get("rank") == "1.0":
        return "adamw, two rates"
    if "compact" in values:
        return "grass compact"
    return "grass rows" if values.get("explore") == "0" else "grass"


def step_seconds(optimizer: str, settings: str, speed: pd.DataFrame) -> float:
    """Measured seconds of one step of a method, its share of a refresh included."""
    row = speed.loc[method_name(optimizer, settings).removesuffix(", two rates")]
    interval = re.search(r"update_interval=(\d+)", settings)
    return float(row["step_ms"] + row["refresh_ms"] / (int(interval[1]) if interval else DEFAULT_INTERVAL)) / 1e3


def markdown(table: pd.DataFrame) -> str:
    """A table with a header, losses to four places."""
    cells = [[_shown(value) for value in row] for row in table.itertuples(index=False)]
    lines = [list(table.columns), ["---"] * len(table.columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
