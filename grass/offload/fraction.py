"""Which share of a step the device takes, and what a step should take: from the tasks that have run.

Offloaded state can also be updated on the device: its master weights and moments are copied there and back. That spends
bandwidth of the link to save time of the CPU. The share is the optimum of our own schedule, simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from grass.machine.rates import RESOURCES, Machine
from grass.offload.tasks import Task, makespan, measured_seconds

GRID = tuple(i / 20 for i in range(21))
TIE = 0.01
"""Relative difference up to which predicted times count as equal."""
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
        return None if self.machine is None else makespan(plan(self.fraction), self.machine.seconds)

    def describe(self, plan: Plan, last: Sequence[Task]) -> str:
        """The fraction, the rates, and the time of a step as predicted and as ``last`` measured it."""
        machine, predicted = self.machine, self.predicted(plan)
        if machine is None or predicted is None:
            return "nothing measured yet"
        rates = f"{_words('host', machine.host_rate / 1e6, 'M elements/s')}, "
        rates += _words("device", machine.device_rate / 1e6, "M elements/s")
        link = f"{_words('down', machine.down_rate / 1e9, 'GB/s')}, {_words('up', machine.up_rate / 1e9, 'GB/s')}"
        step = f"copies and updates of a step, without forward and backward: predicted {predicted * 1e3:.1f} ms, "
        step += f"measured {measured_seconds(last) * 1e3:.1f} ms"
        return f"the device takes {self.fraction:.0%}; {rates}; {link}; {step}"

    def _rate(self, resource: str) -> float:
        """Amount per second; infinite for a resource that has not been used."""
        seconds = self._seconds[resource]
        return self._amounts[resource] / seconds if seconds and self._amounts[resource] else math.inf


def predicted(build: Plan, machine: Machine, grid: Iterable[float] = GRID) -> dict[float, float]:
    """Seconds of a schedule for each fraction of a grid, simulated.

    Args:
        build: makes the schedule in which the device takes this fraction of the updates.
        machine: the rates.
        grid: the fractions.
    """
    return {fraction: makespan(build(fraction), machine.seconds) for fraction in grid}


def best_fraction(build: Plan, machine: Machine, grid: Iterable[float] = GRID) -> float:
    """The fraction of a grid whose schedule is fastest; the smallest of those within 1% of the fastest.

    Args:
        build: makes the schedule in which the device takes this fraction of the updates.
        machine: the rates.
        grid: the fractions.

    Raises:
        ValueError: the grid is empty.
    """
    times = predicted(build, machine, grid)
    if not times:
        raise ValueError("Invalid grid=(). Must hold a fraction.")
    fastest = min(times.values())
    return min(fraction for fraction, seconds in times.items() if seconds <= fastest * (1 + TIE))


def _words(resource: str, rate: float, unit: str) -> str:
    return f"{resource} {rate:.3g} {unit}" if math.isfinite(rate) else f"{resource} not used"
