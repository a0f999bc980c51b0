"""The tasks of one step, as a list: simulated, or run by :class:`grass.offload.executor.Executor`.

Each resource runs its tasks one at a time, in the order of the list. A task starts when its resource is free and all
tasks that it waits for have ended. Simulator and executor take the same list, so they cannot disagree about the order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

SLOTS = 2
"""Parameters whose state may be on the device at the same time."""
Work = Callable[[], object] | None


@dataclass(eq=False)
class Task:
    """A piece of work for one resource.

    Attributes:
        name: for messages and timelines.
        resource: which resource runs it; one of :data:`grass.machine.rates.RESOURCES`.
        amount: bytes for ``"down"`` and ``"up"``, elements for ``"host"`` and ``"device"``.
        after: tasks that must end before this one starts.
        work: what to do; what it returns is dropped. ``None``: nothing, as in a simulation or a pure ordering point.
        start: when it started, in seconds of ``time.perf_counter()``; ``None`` before.
        end: when it ended; ``None`` before.
    """

    name: str
    resource: str
    amount: float
    after: tuple[Task, ...] = field(default=(), repr=False)
    work: Work = field(default=None, repr=False)
    start: float | None = None
    end: float | None = None

    @property
    def done(self) -> bool:
        """Whether an executor has run it to its end."""
        return self.end is not None


def measured_seconds(tasks: Iterable[Task]) -> float:
    """Seconds from the first start to the last end of tasks that have run."""
    spans = [(task.start, task.end) for task in tasks if task.start is not None and task.end is not None]
    return max(end for _, end in spans) - min(start for start, _ in spans)


def check_order(tasks: Iterable[Task], known: Collection[Task] = ()) -> None:
    """Check that every task comes after those that it waits for: then no order of the resources can dead-lock.

    Args:
        tasks: the list.
        known: tasks outside the list that will end. Tasks that an executor has finished need not be named.

    Raises:
        ValueError: a task comes before one that it waits for, waits for one that is not in the list, or is in the list
            twice; the message names the tasks.
    """
    tasks = list(tasks)
    listed, earlier = set(tasks), set[Task]()
    for task in tasks:
        if task in earlier:
            raise ValueError(f"Task {task.name!r} is in the list twice")
        for other in task.after:
            if other not in earlier and other not in known and not other.done:
                where = "comes before" if other in listed else "is in a list without"
                raise ValueError(f"Task {task.name!r} {where} {other.name!r}, which it waits for")
        earlier.add(task)


def makespan(tasks: Sequence[Task], seconds: Callable[[Task], float]) -> float:
    """Predict how long a schedule takes, in seconds; as :func:`simulate`."""
    return max((end for _, end in simulate(tasks, seconds).values()), default=0.0)


def simulate(tasks: Sequence[Task], seconds: Callable[[Task], float]) -> dict[Task, tuple[float, float]]:
    """Predict when each task runs: ``start = max(end of the task before it on its resource, ends of its `after`)``.

    Tasks outside the list that an executor has finished are taken to have ended before the schedule starts.

    Args:
        tasks: the schedule.
        seconds: how long a task takes, such as :meth:`grass.machine.rates.Machine.seconds`.

    Returns:
        Start and end of each task, in seconds after the start of the schedule.

    Raises:
        ValueError: as :func:`check_order` says, or ``seconds`` returns a negative number or NaN.
    """
    check_order(tasks)
    spans: dict[Task, tuple[float, float]] = {}
    free: dict[str, float] = {}
    for task in tasks:
        length = seconds(task)
        if not length >= 0:
            raise ValueError(f"Invalid time of task {task.name!r}: {length} s. Must be >= 0.")
        start = max([free.get(task.resource, 0.0), *(spans[other][1] for other in task.after if other in spans)])
        spans[task] = start, start + length
        free[task.resource] = start + length
    return spans


@dataclass(eq=False)
class ParameterStep:
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


def schedule(steps: Sequence[ParameterStep]) -> tuple[list[Task], list[Task]]:
    """The tasks of a step.

    All gradients go down first, so that none waits behind a state. States go up :data:`SLOTS` parameters ahead.

    Args:
        steps: of the parameters, in the order in which the next forward uses them.

    Returns:
        All tasks, and the last one of each parameter.
    """
    gradients = {step: _down(step) for step in steps if not step.on_device}
    stepped_there = [step for step in steps if step.on_device]
    tasks, ends, states, freed = list(gradients.values()), [], dict[ParameterStep, Task](), list[Task]()

    def send_next_state() -> None:
        if len(states) < len(stepped_there):
            step = stepped_there[len(states)]
            states[step] = _up(step, tuple(freed[-1:]))
            tasks.append(states[step])

    for _ in range(SLOTS):
        send_next_state()
    for step in steps:
        before = states[step] if step.on_device else gradients[step]
        update = Task(
            f"{step.name} update", "device" if step.on_device else "host", step.elements, (before,), step.update
        )
        ends.append(_down(step, (update,)) if step.on_device else _up(step, (update,)))
        tasks += [update, ends[-1]]
        if step.on_device:
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


def _down(step: ParameterStep, after: tuple[Task, ...] = ()) -> Task:
    return Task(f"{step.name} {'state' if step.on_device else 'gradient'}", "down", step.bytes_down, after, step.down)


def _up(step: ParameterStep, after: tuple[Task, ...]) -> Task:
    return Task(f"{step.name} {'state' if step.on_device else 'values'}", "up", step.bytes_up, after, step.up)
