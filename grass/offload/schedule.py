"""The tasks of one step, in the order in which they are queued, and which parameters the device steps.

The executor runs this list and the simulator times it, so a prediction is always one of what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from grass.offload.tasks import Task

SLOTS = 2
"""Parameters whose state may be on the device at the same time."""
Work = Callable[[], object] | None


@dataclass(eq=False)
class Unit:
    """One parameter in one step.

    Attributes:
        name: for messages and timelines.
        on_device: whether the device steps it. Its state then goes up first and down last; otherwise its gradient goes
            down first and its values up last.
        elements: how many values are stepped.
        bytes_down: bytes copied from the device.
        bytes_up: bytes copied to the device.
        down: copies from the device; ``None`` in a plan.
        update: steps.
        up: copies to the device.
    """

    name: str
    on_device: bool
    elements: int
    bytes_down: int
    bytes_up: int
    down: Work = None
    update: Work = None
    up: Work = None


def schedule(units: Sequence[Unit]) -> tuple[list[Task], list[Task]]:
    """The tasks of a step.

    All gradients go down first, so that none waits behind a state. States go up :data:`SLOTS` parameters ahead.

    Args:
        units: in the order in which the next forward uses them.

    Returns:
        All tasks, and the last one of each unit.
    """
    gradients = {unit: _down(unit) for unit in units if not unit.on_device}
    visitors = [unit for unit in units if unit.on_device]
    tasks, ends, states, freed = list(gradients.values()), [], dict[Unit, Task](), list[Task]()

    def send_next_state() -> None:
        if len(states) < len(visitors):
            unit = visitors[len(states)]
            states[unit] = _up(unit, tuple(freed[-1:]))
            tasks.append(states[unit])

    for _ in range(SLOTS):
        send_next_state()
    for unit in units:
        before = states[unit] if unit.on_device else gradients[unit]
        update = Task(
            f"{unit.name} update", "device" if unit.on_device else "host", unit.elements, (before,), unit.update
        )
        ends.append(_down(unit, (update,)) if unit.on_device else _up(unit, (update,)))
        tasks += [update, ends[-1]]
        if unit.on_device:
            freed.append(ends[-1])
            send_next_state()
    return tasks, ends


def placement(fraction: float, elements: Iterable[int]) -> list[bool]:
    """Which parameters the device steps: every ``1 / fraction``-th, weighed by their elements.

    Args:
        fraction: share of all elements, in [0, 1].
        elements: of each parameter, in order.
    """
    placed, wanted, chosen = 0.0, 0.0, []
    for count in elements:
        wanted += fraction * count
        chosen.append(fraction > 0 and wanted - placed >= count / 2)
        placed += count * chosen[-1]
    return chosen


def _down(unit: Unit, after: tuple[Task, ...] = ()) -> Task:
    return Task(f"{unit.name} {'state' if unit.on_device else 'gradient'}", "down", unit.bytes_down, after, unit.down)


def _up(unit: Unit, after: tuple[Task, ...]) -> Task:
    return Task(f"{unit.name} {'state' if unit.on_device else 'values'}", "up", unit.bytes_up, after, unit.up)
