"""A schedule as a list of tasks: simulated, run in any legal order, or run by :class:`grass.offload.executor.Executor`.

Each resource runs its tasks one at a time, in the order of the list. A task starts when its resource is free and all
tasks that it waits for have ended. Simulator and executor take the same list, so they cannot disagree about the order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

RESOURCES = ("down", "up", "host", "device")
"""Copies from device to host, copies from host to device, updates on the CPU, updates on the device."""


@dataclass(eq=False)
class Task:
    """A piece of work for one resource.

    Attributes:
        name: for messages and timelines.
        resource: which resource runs it; one of :data:`RESOURCES`.
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
    work: Callable[[], object] | None = field(default=None, repr=False)
    start: float | None = None
    end: float | None = None

    @property
    def done(self) -> bool:
        """Whether an executor has run it to its end."""
        return self.end is not None


@dataclass(frozen=True)
class Timeline:
    """When each task runs.

    Attributes:
        spans: start and end of each task, in seconds.
        busy: seconds that each resource works.
    """

    spans: dict[Task, tuple[float, float]]
    busy: dict[str, float]

    @property
    def makespan(self) -> float:
        """The end of the last task, in seconds after the start of the schedule."""
        return max((end for _, end in self.spans.values()), default=0.0)


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


def simulate(tasks: Sequence[Task], seconds: Callable[[Task], float]) -> Timeline:
    """Predict when each task runs: ``start = max(end of the task before it on its resource, ends of its `after`)``.

    Tasks outside the list that an executor has finished are taken to have ended before the schedule starts.

    Args:
        tasks: the schedule.
        seconds: how long a task takes, such as :meth:`grass.offload.machine.Machine.seconds`.

    Raises:
        ValueError: as :func:`check_order` says, or ``seconds`` returns a negative number or NaN.
    """
    check_order(tasks)
    spans: dict[Task, tuple[float, float]] = {}
    free: dict[str, float] = {}
    busy: dict[str, float] = {}
    for task in tasks:
        length = seconds(task)
        if not length >= 0:
            raise ValueError(f"Invalid time of task {task.name!r}: {length} s. Must be >= 0.")
        start = max([free.get(task.resource, 0.0), *(spans[other][1] for other in task.after if other in spans)])
        spans[task] = start, start + length
        free[task.resource] = start + length
        busy[task.resource] = busy.get(task.resource, 0.0) + length
    return Timeline(spans, busy)


def legal_next(tasks: Iterable[Task], done: Collection[Task]) -> list[Task]:
    """The tasks that may run now: first of their resource, and all that they wait for are done.

    Args:
        tasks: the schedule.
        done: the tasks that have run, preferably a set.
    """
    first: dict[str, Task] = {}
    for task in tasks:
        if task not in done:
            first.setdefault(task.resource, task)
    return [task for task in first.values() if all(other in done or other.done for other in task.after)]


def legal_orders(tasks: Sequence[Task]) -> Iterator[tuple[Task, ...]]:
    """Every order in which the tasks can start, one by one. Their number grows exponentially with the list.

    Raises:
        ValueError: as :func:`check_order` says.
    """
    check_order(tasks)

    def extend(order: tuple[Task, ...]) -> Iterator[tuple[Task, ...]]:
        if len(order) == len(tasks):
            yield order
        for task in legal_next(tasks, set(order)):
            yield from extend((*order, task))

    return extend(())


@torch.no_grad()
def run_in_order(tasks: Sequence[Task], choose: Callable[[list[Task]], Task]) -> list[Task]:
    """Run all tasks in this thread, in a legal order. Tests draw the order to find races without threads.

    Args:
        tasks: the schedule.
        choose: picks the task to run from those that may run now.

    Returns:
        The tasks as they ran.

    Raises:
        ValueError: as :func:`check_order` says, or ``choose`` returns another task.
    """
    check_order(tasks)
    done: dict[Task, None] = {}
    while ready := legal_next(tasks, done.keys()):
        task = choose(ready)
        if task not in ready:
            raise ValueError(f"Task {task.name!r} may not run now; may run: {', '.join(t.name for t in ready)}")
        if task.work is not None:
            task.work()
        done[task] = None
    return list(done)
