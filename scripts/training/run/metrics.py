"""What a run measures, and where it logs it."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.tensorboard import SummaryWriter

COLUMNS = ("step", "tokens", "loss", "eval_loss", "lr", "grad_norm", "tokens_per_second")


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of all gradients that the model holds now."""
    return sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)


class Clock:
    """Adds up the seconds spent inside ``with clock:``, once per step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self._entered = 0.0
        self._lap = (0.0, 0)

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._entered
        self.steps += 1

    def lap(self) -> float:
        """Seconds per step since the last call."""
        (seconds, steps), self._lap = self._lap, (self.seconds, self.steps)
        return (self.seconds - seconds) / (self.steps - steps)


class NoLog:
    """Logs nothing, for processes that leave it to another."""

    def write(self, row: dict[str, Any]) -> None:
        """Drop a row."""

    def close(self) -> None:
        """Nothing to close."""


class MetricsLog:
    """Logs rows of :data:`COLUMNS` to ``metrics.csv``, and the same numbers to TensorBoard.

    Opened after a resume, it first drops the rows of later steps, which are going to be run again.

    Args:
        out: directory of the run.
        step: steps done so far; 0 starts a new log.
    """

    def __init__(self, out: Path, step: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "metrics.csv"
        truncate_csv(path, step)
        self.file = path.open("a", newline="")
        self.writer = csv.DictWriter(self.file, COLUMNS, lineterminator="\n")
        self.tensorboard = SummaryWriter(out / "tensorboard", purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Log one row; columns that it lacks stay empty."""
        self.writer.writerow(row)
        self.file.flush()
        for name in row.keys() - {"step"}:
            self.tensorboard.add_scalar(name, row[name], row["step"])

    def close(self) -> None:
        """Flush and close both logs."""
        self.file.close()
        self.tensorboard.close()


def truncate_csv(path: Path, step: int) -> None:
    """Rewrite the CSV with its header and the whole rows up to ``step``, in one atomic step."""
    lines = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= step]
    partial = path.with_suffix(".incomplete")
    partial.write_text("".join([",".join(COLUMNS) + "\n", *kept]))
    os.replace(partial, path)
