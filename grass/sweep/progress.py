"""One line on the terminal for each trial."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from grass.extras import optional
from grass.sweep.grid import Place


class Bars:
    """tqdm's bars, one for each trial that has been shown.

    Args:
        steps: of a whole trial.
    """

    def __init__(self, steps: int) -> None:
        self._tqdm, self.steps = optional("tqdm", "progress=True").tqdm, steps
        self._bars: dict[Path, Any] = {}

    @classmethod
    def wanted(cls, shown: bool | None, steps: int) -> Bars | None:
        """Bars if they are to be shown; ``None``: if tqdm is installed and stderr is a terminal."""
        if shown is None:
            shown = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
        return cls(steps) if shown else None

    def show(self, place: Place, row: dict[str, Any]) -> None:
        """Bring a trial's line up to date with its row of the table."""
        if place.stem not in self._bars:
            position = len(self._bars)
            self._bars[place.stem] = self._tqdm(total=self.steps, position=position, desc=place.name, unit="step")
        bar = self._bars[place.stem]
        text = " ".join([*([f"loss {row['loss']:.4g}"] if row["step"] else []), row["end"] or ""])
        if (row["step"] or 0, text) != (bar.n, bar.postfix):
            bar.n = row["step"] or 0
            bar.set_postfix_str(text)

    def close(self) -> None:
        """Leave the lines as they are."""
        for bar in self._bars.values():
            bar.close()
