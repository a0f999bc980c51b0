"""An executor after Ctrl-C at any of its lines: what was submitted runs, all of it or none."""

from __future__ import annotations

from functools import partial

import pytest

from grass.offload.executor import Executor
from grass.offload.tasks import Task
from tests.fuzz.interrupts import at_line
from tests.offload.test_faults import in_time


def attempt(call: str, number: int) -> int:
    """Interrupt a call at its n-th line and go on; returns how many lines ran until then."""
    executor, ran = Executor(), list[str]()
    first = Task("first", "host", 1, work=lambda: ran.append("first"))
    tasks = [first, Task("last", "up", 1, (first,), lambda: ran.append("last"))]
    if call != "submit":
        executor.submit(tasks)
    calls = {"submit": partial(executor.submit, tasks), "wait": partial(executor.wait, tasks[1])}
    lines, _ = at_line(number, calls.get(call, executor.drain))

    def go_on() -> None:
        has = [executor.has(task) for task in tasks]
        assert has in ([True] * 2, [False] * 2)
        executor.drain()
        if not any(has):
            executor.submit(tasks)
            executor.wait(tasks[1])

    assert in_time(go_on) is None
    assert ran == ["first", "last"]
    executor.close()
    return len(lines)


@pytest.mark.parametrize("call", ["submit", "wait", "drain"])
def test_any_line(call: str) -> None:
    number = 1
    while attempt(call, number) == number:
        number += 1
    assert number > 5
