"""When a trial is stopped before its last step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

StopRule = Callable[[int, int, float, list[float]], bool]
"""Called after each yield with the step, the steps of a whole trial, its loss and the others' losses at this step."""


@dataclass(frozen=True)
class Behind:
    r"""Stop a trial that is behind the best other trial at the same step.

    A trial with loss :math:`\ell` is stopped if :math:`\ell > b + m |b|`, where :math:`b` is the least loss of the
    other trials that have been at this step, and :math:`m` the margin. The first trial of a sweep is never stopped.

    Args:
        margin: a share of the best loss, :math:`m`.
        after: a share of the steps, before which no trial is stopped.

    Raises:
        ValueError: a negative or infinite margin, or ``after`` outside [0, 1].
    """

    margin: float = 0.05
    after: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"Invalid margin={self.margin!r}: must be a finite number >= 0")
        if not 0 <= self.after <= 1:
            raise ValueError(f"Invalid after={self.after!r}: must be in [0, 1]")

    def __call__(self, step: int, steps: int, loss: float, others: list[float]) -> bool:
        """Whether to stop now."""
        if not others or step < self.after * steps:
            return False
        best = min(others)
        return loss > best + self.margin * abs(best)
