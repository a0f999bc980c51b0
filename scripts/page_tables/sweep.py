"""The tables of sweeps, from ``benchmarks/sweep_search.csv`` and ``benchmarks/sweep_stopping.csv``."""

from __future__ import annotations

from page_tables.markdown import table
from page_tables.source import read

RULES = {
    "none": "no run is stopped",
    "halving": "the worse half is stopped at 20% and at 50% of the steps",
    "behind 0.02": "2% behind after 30% of the steps",
    "behind 0.05": "**5% behind after 30% of the steps**",
    "behind 0.1": "10% behind after 30% of the steps",
}


def search() -> str:
    """The search for two rates against an exhaustive sweep."""
    header = ["task", "started from", "`--behind`", "runs", "share of the steps", "regret, nats"]
    rows = [
        [
            row["task"],
            "the centre" if row["start"] == "0" else "a quarter of both rates",
            row["margin"] if float(row["margin"]) else "",
            f"{row['runs']} of {row['all_runs']}",
            f"{float(row['share']):.2f}",
            f"{float(row['regret']):.3f}",
        ]
        for row in read("sweep_search.csv")
    ]
    return table(header, rows)


def stopping() -> str:
    """Early stopping, replayed on recorded sweeps."""
    header = ["", "share of the steps", "best run kept", "regret, nats"]
    rows = [
        [
            RULES[row["rule"]],
            f"{float(row['share']):.2f}",
            f"{float(row['kept']):.0%}",
            f"{float(row['regret']):.3f}",
        ]
        for row in read("sweep_stopping.csv")
    ]
    return table(header, rows)
