"""The loss table of README and docs/quality.md, made from the study's results.

    python scripts/study/loss_table.py           # prints it
    python scripts/study/loss_table.py --write   # puts it into the pages

A test fails if a page has other figures than ``benchmarks/quality/cells.csv``.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from grass.command_line import ArgumentParser

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "README.md", ROOT / "docs" / "quality.md"
CELLS = ROOT / "benchmarks" / "quality" / "cells.csv"
BEGIN, END = "<!-- made by scripts/study/loss_table.py -->\n", "<!-- end -->\n"
HORIZONS = {"540": "540 steps", "2150": "2,150 steps"}


class Method(NamedTuple):
    """A row of the table: a label, and the optimizer and settings of its cells."""

    label: str
    optimizer: str
    settings: str


BASELINE = Method("AdamW, one rate", "adamw", "lr=0.002")
METHODS = (
    Method(
        "AdamW, two rates",
        "grass",
        "lr=0.024 rank=1.0 update_interval=1000000 scale=0.125 selection=top_r dim=auto state_policy=reset explore=0",
    ),
    Method("Grass, dense mode, r = 1/4, all others move", "grass", "lr=0.012 scale=0.25"),
    Method("Grass, compact mode, r = q = 1/4", "grass", "lr=0.012 scale=0.25 explore=0.25 compact=True"),
    Method("Grass, compact mode, r = q = 1/8", "grass", "lr=0.012 rank=0.125 scale=0.25 explore=0.125 compact=True"),
    BASELINE,
    Method("GaLore, r = 1/4", "galore", "lr=0.012 update_interval=50"),
    Method("APOLLO, r = 1/4", "apollo", "lr=0.012 update_interval=50"),
)


def losses(cells: list[dict[str, str]], method: Method, steps: str) -> list[float]:
    """Final held-out losses on ``1m``, in the order of the seeds."""
    found = [
        cell
        for cell in cells
        if (cell["task"], cell["model"], cell["steps"]) == ("pretrain", "1m", steps)
        and (cell["optimizer"], cell["settings"]) == method[1:]
    ]
    return [float(cell["loss_100"]) for cell in sorted(found, key=lambda cell: int(cell["seed"]))]


def shown(values: list[float]) -> str:
    """Mean and seeds."""
    if not values:
        return "not run"
    seeds = " ".join(f"{value:.3f}" for value in values)
    return f"**{sum(values) / len(values):.3f}** ({seeds})" if len(values) > 1 else f"{seeds} (one seed)"


def gradient_share(cells: list[dict[str, str]], method: Method, column: str) -> str:
    """Bytes of gradients or state as a share of AdamW's."""
    of = {
        m: next((int(c[column]) for c in cells if (c["optimizer"], c["settings"]) == m[1:] and c["model"] == "1m"), 0)
        for m in (method, BASELINE)
    }
    if "rank=1.0" in method.settings:  # its CSV row has the indices of Grass at full rank besides
        return "1"
    return f"{of[method] / of[BASELINE]:.2f}" if of[method] else ""


def table() -> str:
    """The table in Markdown."""
    with CELLS.open() as file:
        cells = list(csv.DictReader(file))
    lines = [f"| | {' | '.join(HORIZONS.values())} | state | gradients |", "|---|---|---|---|---|"]
    for method in METHODS:
        columns = [shown(losses(cells, method, steps)) for steps in HORIZONS]
        columns += [gradient_share(cells, method, column) for column in ("state_bytes", "gradient_bytes")]
        lines.append(f"| {method.label} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into the pages")
    if parser.parse_args().write:
        for page in PAGES:
            text = page.read_text()
            before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
            page.write_text(f"{before}\n{table()}\n{after}")
    else:
        print(table())


if __name__ == "__main__":
    main()
