"""Tables of what a GPU has measured."""

from __future__ import annotations

from page_tables.markdown import label, number, table
from page_tables.source import Row, read, settings_of

KERNELS = ("compact_grad", "compact_adamw_8bit", "move_factors", "move_rows")
"""Those that were measured; the others did not fit into the time."""

LONG = ("28m-wide", "2150", "0")
"""Model, steps and seed of the long runs."""


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
    for model, hidden in (("200m-wide", "2,048"), ("800m-wide", "4,096")):
        cells = [row for row in read("gpu/cells.csv") if row["model"] == model]
        adamw, grass = (
            {_rate(row): number(row["loss_100"], ".3f") for row in cells if settings_of(row).get("rank") == rank}
            for rank in ("1.0", "0.0625")
        )
        rows += [[hidden, f"{rate:.2g}", adamw[rate], grass.get(8 * rate, "not run")] for rate in sorted(adamw)]
    return table(header, rows)


def long() -> str:
    """Losses at hidden size 768 and the full horizon by the rate of linear layers, first seed."""
    ranks = {"AdamW, two rates": "1.0", "r = q = n/4": None, "r = q = n/8": "0.125", "r = q = n/16": "0.0625"}
    cells = [row for row in read("gpu/cells.csv") if (row["model"], row["steps"], row["seed"]) == LONG]
    of_grass = [row for row in cells if row["optimizer"] == "grass" and "moment_dtype" not in settings_of(row)]
    losses = {
        name: {_rate(row): number(row["loss_100"], ".3f") for row in of_grass if settings_of(row).get("rank") == rank}
        for name, rank in ranks.items()
    }
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    rows = ([f"{rate:.2g}", *(by_rate.get(rate, "") for by_rate in losses.values())] for rate in rates)
    return table(["rate of linear layers", *ranks], rows)


def _rate(row: Row) -> float:
    settings = settings_of(row)
    return float(settings["lr"]) * float(settings["scale"])


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
