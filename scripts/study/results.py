"""The results of a study: a CSV with one row per finished cell, safe to append to from several processes."""

from __future__ import annotations

import csv
import fcntl
import io
from pathlib import Path
from typing import Any

from grid import CURVE_POINTS, Cell

KEY = ("task", "model", "steps", "seed", "optimizer", "settings")
CURVE = tuple(f"loss_{100 * point // CURVE_POINTS}" for point in range(1, CURVE_POINTS + 1))
"""Held-out loss after so many percent of the steps, nats per token; of a classifier, per example."""
FINETUNED = ("accuracy", "trained", "pretraining_loss")
"""Columns of finetuning alone: accuracy, parameters that train, and the loss then on text like the base model's."""
COLUMNS = (*KEY, "tokens", "state_bytes", "host_bytes", "gradient_bytes", "commit", *CURVE, *FINETUNED)


class Results:
    """The rows of one CSV file.

    A row is appended by one write under a lock, so that processes do not mix theirs; what a killed process may have
    left of a row has no line end, and does not count.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def losses(self) -> dict[tuple[str, ...], float]:
        """The final losses of the cells that have a row, by their keys.

        Raises:
            ValueError: the file has other columns than :data:`COLUMNS`.
        """
        if not self.path.exists():
            return {}
        whole = [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        self._check(whole[:1])
        return {tuple(row[column] for column in KEY): float(row[CURVE[-1]] or "nan") for row in csv.DictReader(whole)}

    def append(self, cell: Cell, values: dict[str, Any]) -> None:
        """Add the row of a cell; ``values`` by column.

        Raises:
            ValueError: the file has other columns than :data:`COLUMNS`.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            before = file.read()
            whole = before[: before.rfind(b"\n") + 1]
            self._check(whole.decode().splitlines()[:1])
            if len(whole) < len(before):
                file.truncate(len(whole))
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            if not whole:
                writer.writeheader()
            writer.writerow(dict(zip(KEY, cell.key, strict=True)) | values)
            file.write(text.getvalue().encode())

    def _check(self, header: list[str]) -> None:
        if header and header[0].rstrip("\n") != ",".join(COLUMNS):
            raise ValueError(f"{self.path} has the columns {header[0].rstrip()}, not {','.join(COLUMNS)}")
