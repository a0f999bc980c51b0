"""Schedules for tests: random ones, a pipeline, and a brute-force simulation of time."""

from __future__ import annotations

import hypothesis.strategies as st

from grass.offload.tasks import RESOURCES, Task


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
