"""The table of architectures, from ``benchmarks/models.csv``."""

from __future__ import annotations

from page_tables.markdown import table
from page_tables.source import read


def models() -> str:
    """Covered share, gradients and state of each model, by mode."""
    header = ["", "covered, dense", "state", "covered, compact", "gradients", "state"]
    columns = ("dense_covered", "dense_state", "compact_covered", "compact_gradients", "compact_state")
    rows = []
    for row in read("models.csv"):
        name = f"{row['model']}, experts" if int(row["experts"]) else row["model"]
        rows.append([name, *(f"{float(row[column]):.0%}" for column in columns)])
    return table(header, rows)
