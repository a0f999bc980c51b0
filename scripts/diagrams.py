"""Draw the diagrams of the documentation: `python scripts/diagrams.py` rewrites docs/images/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from grass.command_line import ArgumentParser

INK, FILL, LIGHT, ACCENT = "#24292f", "#2f8f4e", "#e8efe9", "#b5652a"
SELECTED = (1, 4, 5, 10)
"""The selected ones of sixteen columns."""
EXPLORED = (0, 6, 11, 13)
"""The columns that one step explores."""


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    out = parser.parse_args().out
    mpl.rcParams.update({"svg.hashsalt": "grass", "font.size": 9, "svg.fonttype": "none"})
    out.mkdir(parents=True, exist_ok=True)
    for draw in (what_exists, life_of_a_selection):
        draw().savefig(out / f"{draw.__name__}.svg", metadata={"Date": None})


def what_exists() -> Figure:
    """Draw, per weight and method, which elements of gradient and moments exist in memory."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots(3, 4)
    titles = ("AdamW", "Grass, dense mode", "Grass, compact, dim=0", "Grass, compact, dim=1")
    for column, title in enumerate(titles):
        axes[0, column].set_title(title, fontsize=10, color=INK)
        matrix(axes[0, column], whole=column < 2, by_row=column == 2, explored=EXPLORED if column > 1 else ())
        for row in (1, 2):
            matrix(axes[row, column], whole=column == 0, by_row=column < 3)
    for row, label in enumerate(("gradient", "first moment", "second moment")):
        axes[row, 0].set_ylabel(label, fontsize=10, color=INK)
    labels = {"exists": FILL, "exists, explored in this step": ACCENT, "does not exist": LIGHT}
    handles = [Rectangle((0, 0), 1, 1, facecolor=color, edgecolor=INK, label=label) for label, color in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def matrix(axis: Any, whole: bool, by_row: bool, explored: tuple[int, ...] = ()) -> None:
    """Draw a weight's shape and fill what exists of the quantity."""
    axis.add_patch(Rectangle((0, 0), 24, 16, facecolor=FILL if whole else LIGHT, edgecolor=INK))
    for index in () if whole else (*SELECTED, *explored):
        corner, size = ((0, 15 - index), (24, 1)) if by_row else ((1.5 * index, 0), (1.5, 16))
        axis.add_patch(Rectangle(corner, *size, facecolor=ACCENT if index in explored else FILL, edgecolor="none"))
    axis.set(xlim=(-0.5, 24.5), ylim=(-0.5, 16.5), xticks=[], yticks=[], aspect="equal")
    axis.spines[:].set_visible(False)


def life_of_a_selection() -> Figure:
    """Draw when a rule that reads norms chooses rows in compact mode, and from what."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axis = figure.subplots()
    interval, steps = 4, 10
    for step in range(1, steps + 1):
        sketched = step % interval == 0
        box = Rectangle((step - 0.4, 0), 0.8, 1, facecolor=ACCENT if sketched else LIGHT, edgecolor=INK)
        axis.add_patch(box)
        axis.text(step, 0.5, str(step), ha="center", va="center", color="white" if sketched else INK)
    for start, end, name in (
        (1, 4, "first rows: drawn uniformly"),
        (5, 8, "rows chosen in step 4"),
        (9, 10, "in step 8"),
    ):
        axis.add_patch(Rectangle((start - 0.4, -0.75), end - start + 0.8, 0.4, facecolor=FILL, edgecolor="none"))
        axis.text((start + end) / 2, -0.55, name, ha="center", va="center", color="white", fontsize=8)
    for step in (interval, 2 * interval):
        axis.add_patch(FancyArrowPatch((step, 0), (step + 0.9, -0.35), arrowstyle="-|>", mutation_scale=10, color=INK))
    axis.text(0.6, 1.3, "ordinary step: gradient of the active rows only", color=INK)
    axis.text(5.8, 1.3, "step with a sketch: also the norms of all rows", color=ACCENT)
    axis.set(xlim=(0.4, steps + 0.6), ylim=(-0.9, 1.7), aspect="auto")
    axis.axis("off")
    return figure


if __name__ == "__main__":
    main()
