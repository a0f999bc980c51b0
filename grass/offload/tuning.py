"""Which share of a step the device takes, and what a step should take: from the tasks that have run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from grass.offload.machine import Machine
from grass.offload.placement import best_fraction
from grass.offload.tasks import RESOURCES, Task, simulate

TRIALS = (0.0, 0.0, 1.0)
"""Fractions of the first steps with ``fraction="auto"``. The first step makes the state and is not measured."""
Plan = Callable[[float], list[Task]]
"""The tasks of a step in which the device takes a fraction, without work."""


class Tuning:
    """Chooses the fraction of each step.

    Args:
        fraction: as in :class:`grass.Offload`.

    Attributes:
        machine: the rates of the tasks that have run; ``None`` before the second step.
    """

    def __init__(self, fraction: float | str) -> None:
        self._fixed = None if isinstance(fraction, str) else float(fraction)
        self._chosen = self._fixed
        self._steps = 0
        self._amounts = dict.fromkeys(RESOURCES, 0.0)
        self._seconds = dict.fromkeys(RESOURCES, 0.0)
        self.machine: Machine | None = None

    @property
    def fraction(self) -> float:
        """The fraction of the next step."""
        return TRIALS[min(self._steps, len(TRIALS) - 1)] if self._chosen is None else self._chosen

    @property
    def is_settled(self) -> bool:
        """Whether the fraction stays."""
        return self._chosen is not None

    def learn(self, tasks: Sequence[Task], plan: Plan) -> None:
        """Take note of a step that has ended.

        Args:
            tasks: its tasks.
            plan: the tasks of other fractions.
        """
        self._steps += 1
        if self._steps == 1:
            return
        for task in tasks:
            if task.start is not None and task.end is not None:
                self._amounts[task.resource] += task.amount
                self._seconds[task.resource] += task.end - task.start
        host, down, up, device = (self._rate(name) for name in ("host", "down", "up", "device"))
        self.machine = Machine(host, down, up, device)
        if self._chosen is None and self._steps == len(TRIALS):
            self._chosen = best_fraction(plan, self.machine)

    def predicted(self, plan: Plan) -> float | None:
        """Seconds from the first to the last task of a step; ``None`` before the second step."""
        return None if self.machine is None else simulate(plan(self.fraction), self.machine.seconds).makespan

    def _rate(self, resource: str) -> float:
        """Amount per second; infinite for a resource that has not been used."""
        seconds = self._seconds[resource]
        return self._amounts[resource] / seconds if seconds and self._amounts[resource] else math.inf
