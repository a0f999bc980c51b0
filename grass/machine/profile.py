"""How long forward and backward of some samples take on one rank, and how many fit: measured, stored, interpolated."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from grass.machine.rates import Machine


@dataclass(frozen=True)
class Profile:
    """Times of one rank.

    Attributes:
        machine: which hardware they were measured on, as :func:`grass.machine.rates.machine_name` says.
        seconds: of forward and backward of one micro-batch, by its number of samples.
        largest: samples of the largest micro-batch that fits into memory; 0 if none does.
        rates: of the same hardware, and its memory; ``None`` if they were not measured.

    Raises:
        ValueError: a number is out of range, or there is no time although samples fit.
    """

    machine: str
    seconds: dict[int, float]
    largest: int
    rates: Machine | None = None

    def __post_init__(self) -> None:
        if not self.largest >= 0:
            raise ValueError(f"Invalid largest={self.largest}. Must be >= 0.")
        for size, seconds in self.seconds.items():
            if not (0 < size <= self.largest and seconds > 0):
                raise ValueError(
                    f"Invalid seconds={{{size}: {seconds}}}. Sizes must be in 1 ... {self.largest}, seconds > 0."
                )
        if self.largest and not self.seconds:
            raise ValueError(f"Invalid seconds={self.seconds}. Must hold a time if largest={self.largest} samples fit.")

    def predict(self, size: int) -> float:
        """Seconds of a micro-batch of so many samples; 0 of none.

        Between measured sizes, and beyond the largest of them, the curve is a straight line. A larger micro-batch is
        never taken to be faster.
        """
        if size <= 0:
            return 0.0
        sizes = sorted(self.seconds)
        times = list(accumulate((self.seconds[one] for one in sizes), max))
        place = bisect_left(sizes, size)
        if place == 0:
            return times[0]
        if place == len(sizes):
            place -= 1
        if place == 0:  # one measured size: time in proportion
            return times[0] * size / sizes[0]
        (left, right), (before, after) = sizes[place - 1 : place + 1], times[place - 1 : place + 1]
        return before + (after - before) * (size - left) / (right - left)

    def scaled(self, factor: float) -> Profile:
        """The profile of a rank that takes ``factor`` times as long."""
        return Profile(self.machine, {size: factor * s for size, s in self.seconds.items()}, self.largest, self.rates)

    def save(self, path: str | Path) -> None:
        """Write the times, the machine's name and its rates as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """Read a file of :meth:`save`, of any machine.

        Raises:
            ValueError: it does not hold a profile.
        """
        try:
            stored = json.loads(Path(path).read_text())
            seconds = {int(size): float(s) for size, s in stored.pop("seconds").items()}
            rates = stored.pop("rates", None)
            return cls(seconds=seconds, rates=None if rates is None else Machine(**rates), **stored)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold the times of a rank ({error}); measure again") from error


def doubled(most: int) -> list[int]:
    """The sizes to measure: 1, 2, 4, ... and ``most``."""
    return sorted({*(1 << i for i in range(most.bit_length())), most} - {0})


def between(fits: int, fails: int) -> int | None:
    """The next size to try, between the largest that fits and the smallest that does not; ``None`` if there is none."""
    return (fits + fails) // 2 if fails - fits > 1 else None
