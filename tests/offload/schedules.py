"""Schedules for tests: random ones, a pipeline, every legal order, and a brute-force simulation of time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import hypothesis.strategies as st
import torch

from grass.machine.rates import RESOURCES
from grass.offload.tasks import Task, check_order


@st.composite
def schedules(draw: st.DrawFn, max_size: int = 12) -> list[Task]:
    """Tasks on random resources, each waiting for some of those before it; ``amount`` is a whole number of ticks."""
    tasks: list[Task] = []
    for i in range(draw(st.integers(0, max_size))):
        after = draw(st.lists(st.sampled_from(tasks), max_size=3, unique=True)) if tasks else []
        tasks.append(Task(f"t{i}", draw(st.sampled_from(RESOURCES)), draw(st.integers(0, 5)), tuple(after)))
    return tasks


def pipeline(units: int, down: float, host: float, up: float) -> list[Task]:
    """Each unit's gradient goes down, its update runs on the host, its rows go up."""
    tasks: list[Task] = []
    for i in range(units):
        d = Task(f"down {i}", "down", down)
        h = Task(f"host {i}", "host", host, (d,))
        tasks += d, h, Task(f"up {i}", "up", up, (h,))
    return tasks


def tick_by_tick(tasks: list[Task]) -> dict[Task, tuple[int, int]]:
    """Start and end of each task, found by letting a clock tick and starting whatever may start: slow, but plain."""
    queues = {r: [t for t in tasks if t.resource == r] for r in RESOURCES}
    spans: dict[Task, tuple[int, int]] = {}
    now = 0
    while any(queues.values()):
        started = True
        while started:  # tasks of no length end at once and let others start
            started = False
            for queue in queues.values():
                if queue and queue[0] in spans and spans[queue[0]][1] <= now:
                    queue.pop(0)
                    started = True
                ended = {t for t, (_, end) in spans.items() if end <= now}
                if queue and queue[0] not in spans and ended.issuperset(queue[0].after):
                    spans[queue[0]] = now, now + int(queue[0].amount)
                    started = True
        now += 1
    return spans


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
