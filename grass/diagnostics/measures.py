"""The measures of a selection, and the state kept for each weight to compute them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MEASURES = ("turnover", "energy", "coverage")


def turnover(before: Tensor, after: Tensor) -> float:
    """Share of the rows selected ``after`` that were not ``before``; both are boolean masks ``(m,)``."""
    return float((after & ~before).sum() / after.sum())


def energy(norms: Tensor, selected: Tensor) -> float:
    """Share of the squared gradient norm in the selected rows; NaN for a gradient of zeros or one that is not finite.

    Args:
        norms: ``(m,)``, the norms of the gradient's rows.
        selected: boolean mask ``(m,)``.
    """
    squares = norms.detach().to("cpu", torch.float64).square()
    return float(squares[selected].sum() / squares.sum())


class LayerRecord(NamedTuple):
    """One weight at one record; ``step`` counts the optimizer's steps since the history was made."""

    step: int
    layer: str
    turnover: float
    energy: float
    coverage: float


@dataclass
class Tracked:
    """The selections of one weight so far.

    Attributes:
        name: of the weight's layer.
        selected: boolean mask ``(m,)`` of the rows selected now.
        ever: boolean mask ``(m,)`` of the rows that were ever selected.
        refreshes: the optimizer's count of refreshes when this was last updated.
        turnover: of the latest refresh.
        energy: as last measured.
        made: the layer's count of selections when this was last updated; 0 in dense mode.
        selections: indices of each selection with the first step that trained it.
    """

    name: str
    selected: Tensor
    ever: Tensor
    refreshes: int
    turnover: float = 0.0
    energy: float = math.nan
    made: int = 0
    selections: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)

    def reselect(self, selected: Tensor) -> None:
        """Change to the next selection, a boolean mask."""
        self.turnover, self.selected = turnover(self.selected, selected), selected
        self.ever |= selected

    def measure(self, norms: Tensor) -> None:
        """Measure energy by these norms; it stays as it is if they are all zero or not finite."""
        share = energy(norms, self.selected)
        if math.isfinite(share):
            self.energy = share

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON takes it, without the list of selections."""
        return {
            "name": self.name,
            "refreshes": self.refreshes,
            "turnover": self.turnover,
            "energy": self.energy,
            "rows": len(self.ever),
            "selected": _to_hex(self.selected),
            "ever": _to_hex(self.ever),
        }

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any], step: int) -> Tracked:
        """The inverse of :meth:`state_dict`, in a run that goes on at ``step``."""
        selected, ever = (_from_hex(saved[key], saved["rows"]) for key in ("selected", "ever"))
        tracked = cls(saved["name"], selected, ever, saved["refreshes"], saved["turnover"], saved["energy"])
        tracked.note(step)
        return tracked

    def note(self, step: int) -> None:
        """Add the selection to the list, as that of the steps from ``step`` on."""
        self.selections.append((step, self.selected.nonzero()[:, 0].to(torch.int32).numpy()))


def mean(values: list[float]) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _to_hex(mask: Tensor) -> str:
    return np.packbits(mask.numpy()).tobytes().hex()


def _from_hex(text: str, rows: int) -> Tensor:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8), count=rows)
    return torch.from_numpy(bits.astype(np.bool_))
