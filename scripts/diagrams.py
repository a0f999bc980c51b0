"""Draw the diagrams of the documentation: `python scripts/diagrams.py` rewrites docs/images/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import LogLocator

sys.path.append(str(Path(__file__).parent / "bench"))
import grid_costs as costs

from grass.command_line import ArgumentParser
from grass.machine.rates import Machine
from grass.memory import Setting
from grass.memory.models import load_architecture
from grass.memory.offloading import parameters
from grass.offload.tasks import ParameterStep, Task, schedule, simulate
from grass.offload.timeline import draw

INK, FILL, LIGHT, ACCENT = "#24292f", "#2f8f4e", "#e8efe9", "#b5652a"
SELECTED = (1, 4, 5, 10)
"""The selected ones of sixteen columns."""
EXPLORED = (0, 6, 11, 13)
"""The columns that one step explores."""
MACHINE = Machine(host_rate=3e9, down_rate=20e9, up_rate=20e9, device_rate=100e9)
FLOPS, TOKENS = 300e12, 16_384
"""Plausible rates of a server with one GPU, and a batch; the simulated timeline is of these."""


BLOCK = costs.Sizes(tokens=65_536, hidden=5120, wide=13_824)
"""Two layers of a 13B LLaMA's feed-forward block, and the tokens of a batch on all devices."""
RANKS = (4, 9, 16, 36, 64, 144, 256)
COUNTED = Path(__file__).parents[1] / "benchmarks" / "grid_costs.csv"


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    out = parser.parse_args().out
    mpl.rcParams.update({"svg.hashsalt": "grass", "font.size": 9, "svg.fonttype": "none"})
    out.mkdir(parents=True, exist_ok=True)
    for diagram in (what_exists, life_of_a_selection, offload_timeline, grid_costs, uneven_shares, uneven_timeline):
        diagram().savefig(out / f"{diagram.__name__}.svg", metadata={"Date": None})


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


def offload_timeline() -> Figure:
    """Draw the simulated tasks of an offloaded step of LLaMA 1B, and the forward that waits for them."""
    model, setting = load_architecture("1b"), Setting(rank=1 / 8, offload=True)
    named = parameters("Grass", model, setting)
    tasks, ends = schedule([ParameterStep(name, False, p.elements, p.down, p.up) for name, p in named])
    by_part = {
        name: tuple(end for (other, _), end in zip(named, ends, strict=True) if other == name) for name, _ in named
    }
    blocks = [f"block {i}" for i in range(model.layers)]
    flops = 2 * TOKENS * (model.layer_matrix + model.vectors)
    forward = [Task(name, "next forward", flops, (*by_part["end"], *by_part[name])) for name in blocks]
    spans = simulate(
        [*tasks, *forward], lambda t: t.amount / FLOPS if t.resource == "next forward" else MACHINE.seconds(t)
    )
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.subplots()
    draw(axes, [*tasks, *forward], spans)
    axes.set_title("Simulated, not measured: one step of LLaMA 1B in compact mode", fontsize=10, color=INK)
    axes.set_xlabel("seconds after optimizer.step()")
    axes.set_yticklabels(["gradients down", "values up", "update on the host", "next forward"])
    return figure


def grid_costs() -> Figure:
    """Draw what a rank receives in a step and holds, by the number of ranks; counted values are dots."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    received, held = figure.subplots(1, 2)
    drawn = [scheme for scheme in costs.SCHEMES if not scheme.startswith("Replicas")]
    colors = dict(zip(drawn, mpl.colormaps["tab10"].colors, strict=False))
    for scheme, color in colors.items():
        style = {"color": color, "linestyle": "--" if "Grass" in scheme else "-", "label": scheme}
        received.plot(RANKS, [2 * costs.received(scheme, p, BLOCK) / 1e9 for p in RANKS], **style)
        held.plot(RANKS, [2 * sum(costs.held(scheme, p, BLOCK).values()) / 1e9 for p in RANKS], **style)
    counted = pd.read_csv(COUNTED)
    for row in counted[counted.scheme.isin(drawn)].to_dict("records"):
        sizes = costs.Sizes(*(int(row[name]) for name in costs.Sizes._fields))
        share = row["counted"] / costs.received(row["scheme"], row["ranks"], sizes)
        value = share * 2 * costs.received(row["scheme"], row["ranks"], BLOCK) / 1e9
        received.plot(row["ranks"], value, "o", color=colors[row["scheme"]], markersize=4)
    for axes, title in ((received, "received by a rank in a step, GB"), (held, "held by a rank, GB")):
        axes.set(xscale="log", yscale="log", xlabel="ranks", title=title)
        axes.set_xticks(RANKS, [str(p) for p in RANKS])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.legend(*received.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def uneven_shares() -> Figure:
    """Draw the step of two ranks of speeds 3:1 by the share of the first, measured and predicted."""
    rows = pd.read_csv(COUNTED.with_name("uneven.csv"))
    rows = rows[rows.contestant.str.match(r"Grass, \d")]
    first = rows.sizes.str.split("+").str[0].astype(int)
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(first, rows.predicted, color=INK, label="predicted")
    axes.plot(first, rows.seconds, "o", color=FILL, label="measured")
    axes.set(xlabel="samples of the rank that is 3 times as fast, of 16", ylabel="step, s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def uneven_timeline() -> Figure:
    """Draw how long each rank computes in a step and how long it waits, for an even and an uneven batch."""
    rows = pd.read_csv(COUNTED.with_name("uneven.csv"))
    every = list(rows.speeds.unique())
    figure = Figure(figsize=(8, 1 + len(every)), layout="constrained")
    for axes, speeds in zip(figure.subplots(len(every), 2, sharex=True), every, strict=True):
        for place, contestant in zip(axes, ("Grass, even", "Grass, dealt"), strict=True):
            row = rows[(rows.speeds == speeds) & (rows.contestant == contestant)].iloc[0]
            ranks = speeds.split(":")
            busy = [row[f"busy_{rank}"] for rank in range(len(ranks))]
            place.barh(range(len(ranks)), row.seconds, color=LIGHT, label="waits")
            place.barh(range(len(ranks)), busy, color=FILL, label="computes")
            place.set(title=f"{contestant.removeprefix('Grass, ')}: {row.sizes}")
            place.set_yticks(range(len(ranks)), [f"speed {speed}" for speed in ranks])
            place.invert_yaxis()
    for place in axes:
        place.set_xlabel("seconds of a step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


if __name__ == "__main__":
    main()
