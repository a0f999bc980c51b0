"""A sweep in TensorBoard: its curves, and its table in the tab of hyperparameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from grass.extras import optional
from grass.sweep.grid import Place
from grass.sweep.journal import Journal


class Board:
    """Writes what the journals of trials have into one log of TensorBoard for each trial.

    Args:
        folder: of the logs.
    """

    def __init__(self, folder: Path) -> None:
        optional("tensorboard", "tensorboard=True")
        self.folder = folder
        self._writers: dict[Path, Any] = {}
        self._shown: dict[Path, int] = {}
        self._ended: set[Path] = set()

    def show(self, place: Place, journal: Journal, row: dict[str, Any]) -> None:
        """Add the losses that are new, and when the trial has ended its settings and its last loss."""
        new = list(journal.losses.items())[self._shown.get(place.stem, 0) :]
        if not new and (row["end"] is None or place.stem in self._ended):
            return
        writer = self._writer(place)
        for step, loss in new:
            writer.add_scalar("loss", loss, step)
        self._shown[place.stem] = len(journal.losses)
        if row["end"] is not None and place.stem not in self._ended:
            self._ended.add(place.stem)
            settings = {key: "None" if value is None else value for key, value in place.settings.items()}
            last = {"last loss": math.nan if row["loss"] is None else row["loss"], "last step": row["step"] or 0}
            writer.add_hparams({**settings, "end": row["end"]}, last, run_name=".")
        writer.flush()

    def close(self) -> None:
        """Close the logs."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, place: Place) -> Any:
        if place.stem not in self._writers:
            log = self.folder / place.stem.name
            for old in log.glob("events.out.tfevents.*"):  # of an earlier command, whose losses come again
                old.unlink()
            self._writers[place.stem] = optional("torch.utils.tensorboard", "tensorboard=True").SummaryWriter(str(log))
        return self._writers[place.stem]
