"""The executor: order, waiting, faults that end in an error and never in a hang, and the life of its threads.

The faults share one executor's helpers, which is why the file has more than 300 lines.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grass.offload import executor as module
from grass.offload.executor import Executor
from grass.offload.tasks import Task, makespan
from tests.offload.schedules import pipeline, schedules

LIMIT = 1200.0
"""Seconds after which a hang fails; no test waits for them."""


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor()
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Work that waits for this event runs on until it is set, at the latest when the test ends."""
    made = threading.Event()
    yield made
    made.set()


def stuck(gate: threading.Event) -> Task:
    return Task("stuck", "host", 1, work=lambda: gate.wait(LIMIT))


def begun(executor: Executor, gate: threading.Event) -> Task:
    """A task that has begun and runs until the gate opens."""
    begins = threading.Event()
    task = Task("stuck", "host", 1, work=lambda: begins.set() or gate.wait(LIMIT))
    executor.submit([task])
    assert begins.wait(LIMIT)
    return task


def when_somebody_waits(executor: Executor, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    changed: Any = executor._state.changed
    wait = changed.wait
    caller = threading.current_thread()

    def waiting(timeout: float | None = None) -> bool:
        if threading.current_thread() is caller:
            do()  # the lock is held until the wait has begun
        return wait(timeout)

    monkeypatch.setattr(changed, "wait", waiting)


@given(schedules())
def test_order(tasks):
    ran: list[Task] = []
    for task in tasks:
        task.work = lambda task=task: ran.append(task)
    executor = Executor()
    executor.submit(tasks)
    executor.drain(LIMIT)
    assert sorted(ran, key=tasks.index) == tasks
    for task in tasks:
        assert all(other.end <= task.start <= task.end for other in task.after)
    for resource in {task.resource for task in tasks}:
        queue = [task for task in tasks if task.resource == resource]
        assert [task for task in ran if task.resource == resource] == queue
        assert all(a.end <= b.start for a, b in itertools.pairwise(queue))
    executor.close()


@given(schedules(), st.integers(0, 12))
def test_lists_may_come_one_after_another(tasks, cut):
    executor = Executor()
    executor.submit(tasks[:cut])
    executor.submit(tasks[cut:])
    for task in reversed(tasks):
        executor.wait(task, LIMIT)
        assert task.done
    executor.close()


def test_resources_work_at_the_same_time(executor):
    """Each task waits for the other: only threads side by side get through."""
    meeting = threading.Barrier(4, timeout=LIMIT)
    executor.submit(Task(r, r, 1, work=meeting.wait) for r in executor.resources)
    executor.drain(LIMIT)


def test_submit_returns_at_once_and_wait_waits_for_its_task_alone(executor, gate):
    quick = Task("quick", "up", 1)
    task = begun(executor, gate)
    executor.submit([quick])
    executor.wait(quick, LIMIT)
    assert not task.done
    with pytest.raises(TimeoutError, match=r"(?s)Not done after 0\.01 s.*host: runs 'stuck' for"):
        executor.wait(task, timeout=0.01)
    gate.set()
    executor.wait(task, LIMIT)
    executor.drain()


def test_threads_run_without_gradients(executor):
    modes: list[bool] = []
    executor.submit([Task("t", "host", 1, work=lambda: modes.append(torch.is_grad_enabled()))])
    executor.drain(LIMIT)
    assert modes == [False]


def test_threads_start_with_the_first_task(executor):
    before = set(threading.enumerate())
    executor.submit([Task("a", "up", 1), Task("b", "up", 1)])
    executor.drain(LIMIT)
    started = set(threading.enumerate()) - before
    assert [(thread.name, thread.daemon) for thread in started] == [("grass-up", True)]


def test_what_ran_keeps_nothing_in_memory(executor, gate):
    first, second = Task("first", "up", 1, work=lambda: None), Task("second", "up", 1)
    executor.submit([first])
    executor.drain(LIMIT)
    assert first.work is None
    second.after = (first,)
    executor.submit([second])
    assert second.after == ()


def test_measured_times_serve_the_simulator(executor):
    tasks = pipeline(3, 1, 1, 1)
    executor.submit(tasks)
    executor.drain(LIMIT)
    predicted = makespan(tasks, lambda task: task.end - task.start)
    measured = tasks[-1].end - tasks[0].start
    assert predicted <= measured + 1e-9


def failing(resource: str, error: BaseException) -> list[Task]:
    """A task that fails, one that waits for it, and one behind that."""

    def work() -> None:
        raise error

    bad = Task("bad", resource, 1, work=work)
    return [bad, dependent := Task("dependent", "up", 1, (bad,)), Task("last", "up", 1, (dependent,))]


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_fault(executor, error):
    tasks = failing("host", error)
    executor.submit(tasks)
    said = re.escape(f"Task 'bad' on 'host' failed: {error!r}")
    for call in (
        lambda: executor.wait(tasks[-1], LIMIT),
        lambda: executor.wait(tasks[0], LIMIT),
        lambda: executor.drain(LIMIT),
        lambda: executor.submit([Task("next", "down", 1)]),
    ):
        with pytest.raises(RuntimeError, match=said) as info:
            call()
        assert info.value.__cause__ is error
    for line in (
        "  down: idle; 0 waiting",
        "  up: idle; 2 waiting: 'dependent' (after 'bad'), 'last' (after 'dependent')",
        "  host: runs 'bad' for 0.0 s; 0 waiting",
        "  device: idle; 0 waiting",
    ):
        assert re.sub(r"for [\d.]+ s", "for 0.0 s", executor.report()).find(line) > 0
    assert [task.done for task in tasks] == [False] * 3
    assert tasks[1].start is None


def test_fault_reaches_who_waits_already(executor, gate, monkeypatch):
    bad = Task("bad", "host", 1, work=lambda: 1 / 0 if gate.wait(LIMIT) else None)
    executor.submit([bad, last := Task("last", "up", 1, (bad,))])
    when_somebody_waits(executor, gate.set, monkeypatch)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        executor.wait(last, LIMIT)


def test_long_queues_are_cut_in_the_report(executor, gate):
    first = stuck(gate)
    executor.submit([first, *(Task(f"t{i}", "up", 1, (first,)) for i in range(9))])
    assert "up: idle; 9 waiting: 't0' (after 'stuck'), " in executor.report()
    assert "'t4' (after 'stuck'), 4 more" in executor.report()


@pytest.mark.parametrize("call", ["wait", "drain", "submit"])
def test_deadline(gate, call):
    executor = Executor(deadline=0.05)
    executor.submit([task := stuck(gate), Task("behind", "host", 1)])

    def calls() -> None:
        while True:  # submit() does not wait for the deadline
            if call == "submit":
                executor.submit([])
            else:
                executor.wait(task) if call == "wait" else executor.drain()

    with pytest.raises(RuntimeError, match=r"(?s)'stuck' on 'host' runs for more than 0\.05 s.*waiting: 'behind'"):
        calls()
    gate.set()
    executor.close()
    with pytest.raises(RuntimeError, match="runs for more than"):
        executor.drain()


def test_thread_that_an_outside_exception_ends(executor):
    executor.submit([Task("first", "host", 1)])
    executor.drain(LIMIT)
    thread = executor._state.threads["host"]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))

    def calls() -> None:
        while True:  # the exception comes with the thread's next line of Python
            executor.submit([task := Task("next", "host", 1)])
            executor.wait(task, LIMIT)

    with pytest.raises(RuntimeError, match=r"on 'host' failed: SystemExit|thread of 'host' failed: SystemExit"):
        calls()


def test_thread_that_died_in_silence(executor, monkeypatch):
    monkeypatch.setattr(module.TaskQueues, "_take", lambda queues, resource: None)
    executor.submit([task := Task("t", "host", 1)])
    with pytest.raises(RuntimeError, match=r"(?s)The thread of 'host' died.*host: idle; 1 waiting: 't'"):
        executor.wait(task, LIMIT)


def test_an_interrupt_while_threads_are_asked_whether_they_live(executor):
    """CPython takes a thread for dead whose ``is_alive()`` was interrupted."""
    executor.submit([Task("first", "host", 1)])
    executor.drain(LIMIT)
    thread = executor._state.threads["host"]
    thread._is_stopped = True  # what such an interrupt leaves behind
    try:
        executor.submit([task := Task("next", "host", 1)])
        executor.wait(task, LIMIT)
    finally:
        thread._is_stopped = False


def test_misuse(executor):
    first = Task("first", "host", 1)
    second = Task("second", "up", 1, (first,))
    cases = [
        ([Task("t", "disk", 1)], "Invalid resource 'disk' of task 't'"),
        ([second, first], "'second' comes before 'first'"),
        ([second], "'second' is in a list without 'first'"),
        ([first, first], "'first' is in the list twice"),
    ]
    for tasks, message in cases:
        with pytest.raises(ValueError, match=message):
            executor.submit(tasks)
    with pytest.raises(ValueError, match="'first' was not submitted"):
        executor.wait(first)
    executor.submit([first, second])
    with pytest.raises(ValueError, match="'first' was submitted before"):
        executor.submit([first])
    executor.drain(LIMIT)
    with pytest.raises(ValueError, match="'first' was submitted before"):
        executor.submit([first])
    with pytest.raises(ValueError, match="Invalid deadline=0"):
        Executor(deadline=0)


def test_close():
    executor = Executor()
    executor.submit([Task("t", r, 1) for r in executor.resources])
    executor.drain(LIMIT)
    executor.close()
    executor.close()
    assert not any(thread.is_alive() for thread in executor._state.threads.values())
    with pytest.raises(RuntimeError, match="The executor is closed"):
        executor.submit([Task("t", "up", 1)])


def test_garbage_executors_end_their_threads():
    executor = Executor()
    executor.submit([Task("t", "up", 1)])
    executor.drain(LIMIT)
    thread = executor._state.threads["up"]
    del executor
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_copies_are_fresh(executor, copied):
    executor.submit(failing("host", ValueError("boom")))
    with pytest.raises(RuntimeError):
        executor.drain(LIMIT)
    other = copied(executor)
    other.submit([task := Task("t", "host", 1)])
    other.wait(task, LIMIT)
    assert other.resources == executor.resources
    other.close()


FORKING = """
import os, sys, threading
from grass.offload.executor import Executor
from grass.offload.tasks import Task

executor, untouched, gate = Executor(), Executor(), threading.Event()
for e in (executor, untouched):
    e.submit([stuck := Task("stuck", "host", 1, work=gate.wait)])
    e._state.changed.acquire()  # as another thread of the parent might in the moment of the fork
child = os.fork()
if child == 0:
    executor.submit([task := Task("t", "host", 1)])
    executor.wait(task)
    try:
        executor.wait(stuck)
    except RuntimeError as error:
        sys.exit(7 if "was forked while 'stuck' was on its way" in str(error) else 1)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)


@pytest.mark.slow
def test_fork():
    run_python(FORKING)


@pytest.mark.slow
def test_process_ends_while_a_task_runs():
    run_python(FORKING.split("child =")[0].replace("    e._state.changed.acquire()", "    #"))
