"""The results of a study: a CSV with one row per finished cell, safe to append to from several processes."""

from __future__ import annotations

import csv
import fcntl
import io
from pathlib import Path
from typing import Any

from grid import CURVE_POINTS, Cell

KEY = ("model", "steps", "seed", "optimizer", "settings")
CURVE = tuple(f"loss_{100 * point // CURVE_POINTS}" for point in range(1, CURVE_POINTS + 1))
"""Held-out loss after so many percent of the steps, nats per token."""
COLUMNS = (*KEY, "tokens", "state_bytes", "host_bytes", "gradient_bytes", "commit", *CURVE)


class Results:
    """The rows of one CSV file.

    A row is appended by one write under a lock, so that processes do not mix theirs; what a killed process may have
    left of a row has no line end, and does not count.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def done(self) -> set[tuple[str, ...]]:
        """The keys of the cells that have a row."""
        if not self.path.exists():
            return set()
        whole = [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return {tuple(row[column] for column in KEY) for row in csv.DictReader(whole)}

    def append(self, cell: Cell, values: dict[str, Any]) -> None:
        """Add the row of a cell; ``values`` by column."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            before = file.read()
            whole = before[: before.rfind(b"\n") + 1]
            if len(whole) < len(before):
                file.truncate(len(whole))
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            if not whole:
                writer.writeheader()
            writer.writerow(dict(zip(KEY, cell.key, strict=True)) | values)
            file.write(text.getvalue().encode())
