"""How long a sweep takes: a trial a device, one after another, or each divided over all devices."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

SECONDS_OF_AN_HOUR = 3600


class Hours(NamedTuple):
    """Hours of a whole sweep.

    Attributes:
        pool: each device has a trial of its own at a time.
        one_device: one device runs all trials, one after another.
        pipelined: all devices run one trial at a time, whose layers are divided over them.
    """

    pool: float
    one_device: float
    pipelined: float


class Sweep(NamedTuple):
    """Trials of equal length.

    Attributes:
        trials: how many.
        steps: of each.
        devices: that are there.
    """

    trials: int
    steps: int
    devices: int

    @classmethod
    def parse(cls, text: str, devices: int) -> Sweep:
        """From a text such as ``"6x300"``: six trials of 300 steps.

        Raises:
            ValueError: another text, or a number below 1.
        """
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if found is None:
            raise ValueError(f"Invalid --sweep {text}: must be TRIALSxSTEPS, such as 6x300")
        if devices < 1:
            raise ValueError(f"Invalid --devices {devices}: must be >= 1")
        return cls(int(found[1]), int(found[2]), devices)

    def hours(self, step: float, microbatches: int) -> Hours:
        r"""Hours, if a step of one trial on one device takes ``step`` seconds.

        With :math:`d` devices and :math:`m` micro-batches, a pipeline (GPipe; Huang et al., 2019, arXiv 1811.06965)
        takes :math:`(m + d - 1) / (m d)` of the time of one device, if its stages are equally long. A trial of its own
        for each device has no such bubble, as in Hydra (arXiv 2110.08633).
        """
        each = self.steps * step / SECONDS_OF_AN_HOUR
        bubble = (microbatches + self.devices - 1) / (microbatches * self.devices)
        return Hours(math.ceil(self.trials / self.devices) * each, self.trials * each, self.trials * each * bubble)
