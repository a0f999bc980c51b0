"""Tables of communication."""

from __future__ import annotations

from page_tables.markdown import label, number, table
from page_tables.source import read

RANKS = {"0.25": "1/4", "0.125": "1/8", "0.0625": "1/16"}


def wire_bytes() -> str:
    """Bytes handed to collectives, with a refresh every 10 steps."""
    header = ["", "rank", "ordinary step", "refresh step", "mean", "of AdamW", "gradients", "as bucket view"]
    return table(
        header,
        (
            [
                label(row["optimizer"]),
                "" if row["optimizer"] == "adamw" else RANKS[row["rank"]],
                *(number(row[name], ".2f") for name in ("ordinary_mb", "refresh_mb", "mb_per_step", "of_adamw")),
                *(number(row[name], ".1f") for name in ("gradients_mb", "gradients_view_mb")),
            ]
            for row in read("wire_bytes.csv")
            if row["interval"] == "10"
        ),
    )


def grid_link() -> str:
    """A step on four ranks over a slowed link: on a grid, and of tensor parallelism beside FSDP2 or in replicas."""
    header = ["", "step", "link alone", "MB sent", "times AdamW on a grid", "times AdamW, FSDP2 x 1D"]
    rows = list(read("grid_link.csv"))
    beside = next(float(row["seconds"]) for row in rows if row["optimizer"] == "AdamW, FSDP2 x 1D")
    return table(
        header,
        (
            [
                label(row["optimizer"]),
                *(f"{float(row[name]):.2f} s" for name in ("seconds", "link_s")),
                number(row["sent_mb"], ".1f"),
                number(row["times_adamw"], ".2f"),
                f"{beside / float(row['seconds']):.2f}",
            ]
            for row in rows
        ),
    )


def slow_link() -> str:
    """Throughput over a slowed link."""
    header = ["", "link", "tokens/s", "times AdamW", "step", "alone", "link alone", "hidden"]
    return table(
        header,
        (
            [
                label(row["optimizer"]),
                f"{float(row['link_mbit_s']):,.0f} Mbit/s",
                number(row["tokens_per_s"], ",.0f"),
                number(row["times_adamw"], ".2f"),
                *(f"{float(row[name]):.2f} s" for name in ("seconds", "compute_s", "link_s")),
                f"{float(row['hidden']):.0%}",
            ]
            for row in read("slow_link.csv")
        ),
    )


def uneven() -> str:
    """Steps of uneven batches on stand-ins for devices."""
    header = ["speeds", "", "sizes", "step", "predicted", "times even", "error of the gradient"]
    return table(
        header,
        (
            [
                row["speeds"],
                row["contestant"],
                row["sizes"].replace("+", " + "),
                *(f"{float(row[name]):.2f} s" for name in ("seconds", "predicted")),
                number(row["times_even"], ".2f"),
                f"{float(row['bias']):.0%}" if row["bias"] else "",
            ]
            for row in read("uneven.csv")
            if not row["contestant"].removeprefix("Grass, ")[0].isdigit()
        ),
    )
