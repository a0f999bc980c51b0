"""Which trial starts next: the one that takes longest, so that no device waits for a long one at the end.

Hydra (Nagrecha and Kumar, 2021, arXiv 2110.08633) calls it longest remaining time first. Times come from the caller, as
from :mod:`grass.memory`'s duration of a step, or from the trials that have run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from grass.sweep.grid import Place, Settings
from grass.sweep.journal import Journal

Seconds = Callable[..., float]
"""Takes the settings of a trial as keyword arguments; returns what the whole trial takes, in any unit."""

ALIKE = 1.25
"""Times whose ratio is less may count as equal: trials that are alike keep the order of the grid."""


def longest_first(
    left: list[Place], every: list[Place], journals: dict[Path, Journal], steps: int, given: Seconds | None
) -> list[Place]:
    r"""Trials by the time that is left of them, the longest first; in the order of ``left`` where it is about equal.

    A trial that has reached step :math:`s` of :math:`S` has :math:`t (1 - s / S)` left. Without ``given``, :math:`t` is
    :math:`S` times the seconds a step of those trials that share the most settings with it.

    Args:
        left: trials that have not ended.
        every: all trials, also those that have ended.
        journals: of all trials, by their stems.
        steps: of a whole trial.
        given: the time of a whole trial.

    Raises:
        ValueError: ``given`` returns no positive finite number.
    """
    paces = [(place.settings, pace) for place in every if (pace := journals[place.stem].pace) is not None]

    def remaining(place: Place) -> float:
        whole = _like(place.settings, paces) * steps if given is None else _given(given, place)
        reached = next(reversed(journals[place.stem].losses), 0)
        return whole * (1 - min(reached, steps) / steps)

    return sorted(left, key=lambda place: -_rounded(remaining(place)))


def _like(settings: Settings, paces: list[tuple[Settings, float]]) -> float:
    """Seconds a step, the mean of the trials that share the most settings; 0 if none has run."""
    shared = [sum(settings[key] == value for key, value in other.items() if key in settings) for other, _ in paces]
    nearest = [pace for (_, pace), count in zip(paces, shared, strict=True) if count == max(shared)]
    return sum(nearest) / len(nearest) if nearest else 0.0


def _given(given: Seconds, place: Place) -> float:
    found = given(**place.settings)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
        raise ValueError(f"Invalid seconds={found!r} of the trial {place.name}: must be a finite number > 0")
    return float(found)


def _rounded(seconds: float) -> int:
    return round(math.log(seconds, ALIKE)) if seconds > 0 else -(1 << 30)
