"""The table of offloaded training steps, from ``benchmarks/offload.csv``."""

from __future__ import annotations

from page_tables.markdown import table
from page_tables.source import select


def offload() -> str:
    """Steps where computing, updates and copies take about equally long."""
    rows = select("offload.csv", "regime=balanced")
    header = ["", "step", "times as fast as synchronous", "floor", "computing", "updates", "copies, both directions"]
    times = ("compute_ms", "update_ms", "link_ms")
    return table(
        header,
        (
            [
                row["contestant"],
                f"{float(row['step_ms']):.0f} ms",
                f"{float(row['times_synchronous']):.2f}",
                f"{float(row['floor_ms']):.0f} ms" if row["contestant"].endswith("overlapped") else "",
                *(f"{float(row[name]):.0f} ms" for name in times),
            ]
            for row in rows
        ),
    )
