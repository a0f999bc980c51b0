"""Tables of what a GPU has measured."""

from __future__ import annotations

from fractions import Fraction

from page_tables.law import WIDEST, WIDTHS, is_of_the_law, linear_rate
from page_tables.markdown import label, number, table
from page_tables.source import read, settings_of

KERNELS = ("compact_grad", "compact_adamw_8bit", "move_factors", "move_rows")
"""Those that were measured; the others did not fit into the time."""

LONG = ("28m-wide", "2150")
"""Model and steps of the long runs."""
RATES_OF = ("9m-wide", "28m-wide")
"""Models whose rates were searched."""
RANKS = {"AdamW": "1.0", "r = q = n/4": None, "r = q = n/8": "0.125", "r = q = n/16": "0.0625"}
"""Ranks of the columns of their table, as cells have them."""


def steps() -> str:
    """Whole training steps."""
    header = ["", "sequences", "ms", "tokens/s", "times AdamW", "peak"]
    return table(
        header,
        (
            [
                label(row["optimizer"]),
                row["batch_size"],
                number(row["step_ms"], ".0f"),
                number(row["tokens_per_s"], ",.0f"),
                number(row["times_adamw"], ".2f"),
                f"{number(row['peak_gib'], '.1f')} GiB",
            ]
            for row in read("gpu/train_step.csv")
        ),
    )


def kernels() -> str:
    """Each kernel's share of the ceiling and how many times as fast as torch it is, over all its cases."""
    header = ["", "cases", "share of the ceiling", "times as fast as its PyTorch version"]
    rows = []
    for name in KERNELS:
        cases = read(f"gpu/{name}.csv")
        shares = sorted(float(row["of_ceiling"]) for row in cases)
        faster = sorted(float(row["torch_us"]) / float(row["us"]) for row in cases)
        rows.append([f"`{name}`", str(len(cases)), _span(shares), _span(faster)])
    return table(header, rows)


def _span(values: list[float]) -> str:
    return f"{values[0]:.2f} to {values[-1]:.2f}, median {values[len(values) // 2]:.2f}"


def widths() -> str:
    """Losses of AdamW with two rates and of Grass with n/16 at eight times its rate, for wide models."""
    header = ["hidden size", "AdamW's rate of linear layers", "loss", "Grass, r = q = n/16, at eight times the rate"]
    rows = []
    for model, hidden in WIDEST.items():
        cells = [row for row in read("gpu/cells.csv") if row["model"] == model]
        adamw, grass = (
            {
                linear_rate(settings_of(row)): number(row["loss_100"], ".3f")
                for row in cells
                if settings_of(row).get("rank") == rank
            }
            for rank in ("1.0", "0.0625")
        )
        rows += [[hidden, f"{rate:.2g}", adamw[rate], grass.get(8 * rate, "not run")] for rate in sorted(adamw)]
    return table(header, rows)


def rates() -> str:
    """Losses of the first seed by width, horizon and both rates: of linear layers, and of all other parameters."""
    losses: dict[tuple[int, int, float, float], dict[str | None, str]] = {}
    for row in read("gpu/cells.csv"):
        values = settings_of(row)
        searched = row["model"] in RATES_OF and row["steps"] != "270" and "scale" in values
        if searched and row["optimizer"] == "grass" and row["seed"] == "0" and is_of_the_law(values):
            key = (int(WIDTHS[row["model"]]), int(row["steps"]), -float(values["lr"]), linear_rate(values))
            losses.setdefault(key, {})[values.get("rank")] = number(row["loss_100"], ".3f")
    rows = (
        [str(hidden), f"{steps:,}", f"{-other:g}", f"{rate:.2g}", *(of.get(rank, "") for rank in RANKS.values())]
        for (hidden, steps, other, rate), of in sorted(losses.items())
    )
    return table(["hidden size", "steps", "other parameters", "linear layers", *RANKS], rows)


def one_rate() -> str:
    """Losses at hidden size 768 and the full horizon with one rate for all parameters, by seed."""
    losses: dict[str, dict[str, list[str]]] = {}
    for row in sorted(read("gpu/cells.csv"), key=lambda row: row["seed"]):
        values = settings_of(row)
        ours = row["optimizer"] == "grass" and is_of_the_law(values) and "scale" not in values
        if (row["model"], row["steps"]) == LONG and (ours or row["optimizer"] == "adamw"):
            name = "AdamW" if not ours else f"r = q = {Fraction(values.get('rank', '0.25'))} n"
            losses.setdefault(values["lr"], {}).setdefault(name, []).append(number(row["loss_100"], ".3f"))
    names = list(dict.fromkeys(name for of in losses.values() for name in of))
    by_rate = sorted(losses.items(), key=lambda item: float(item[0]))
    return table(["`lr`", *names], ([lr, *(" ".join(of.get(name, [])) for name in names)] for lr, of in by_rate))


def host_time() -> str:
    """What the host does in a step, and what it did when a GPU was last at hand."""
    measures = {"forward_ms": "forward, ms", "backward_ms": "backward, ms", "step_ms": "`step()`, ms"}
    header = ["", *(name for measure in measures.values() for name in (measure, "before")), "launches", "before"]
    every = read("host_time.csv")
    before = {row["optimizer"]: row for row in every if row["commit"] == every[0]["commit"]}
    rows = (
        [
            label(row["optimizer"]),
            *(
                number(each[name], ".0f")
                for name in (*measures, "launches")
                for each in (row, before[row["optimizer"]])
            ),
        ]
        for row in every
        if row["commit"] == every[-1]["commit"]
    )
    return table(header, rows)
