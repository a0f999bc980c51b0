"""One thread per resource runs a schedule of :mod:`grass.offload.tasks` beside the caller."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from grass.offload.queues import Queues
from grass.offload.tasks import RESOURCES, Task, check_order

POLL = 0.5
"""Seconds after which a waiting caller looks whether the threads still live."""


class Executor:
    """Runs tasks in the background, those of each resource one at a time and in the order in which they came.

    Threads start with the first task of their resource and run under ``torch.no_grad()``. They do not keep the process
    alive. They end when the executor is closed or garbage-collected. A copy of the executor, pickled or not, starts
    without tasks and threads, and so does the executor in a forked child: :meth:`drain` before.

    The first fault ends everything: no other task starts, and every later call raises.

    Args:
        resources: those that tasks may name.
        deadline: seconds that one task may run.
    """

    def __init__(self, resources: Iterable[str] = RESOURCES, deadline: float = 600.0) -> None:
        if not deadline > 0:
            raise ValueError(f"Invalid {deadline=}. Must be > 0.")
        self.resources = tuple(resources)
        self.deadline = deadline
        self._start_afresh()

    def submit(self, tasks: Iterable[Task]) -> None:
        """Append tasks to the queues of their resources, and return at once.

        If this raises, none of the tasks was appended, unless it is interrupted: then :meth:`has` tells.

        A task that runs loses its ``work``, and one submitted loses those of its ``after`` that have ended: neither
        keeps tensors or earlier steps in memory.

        Raises:
            ValueError: a task names another resource, was submitted before, or waits for a task that comes later or
                was never submitted.
            RuntimeError: an earlier task failed, took too long or lost its thread; or the executor is closed.
        """
        tasks = list(tasks)
        queues = self._queues()
        with queues.lock:
            queues.check_threads()
            queues.raise_fault()
            for task in tasks:
                self._check(task, queues)
            check_order(tasks, queues.pending)
            queues.append(tasks)

    def wait(self, task: Task, timeout: float | None = None) -> None:
        """Block until a task is done.

        Args:
            task: one that was submitted.
            timeout: seconds to wait at most.

        Raises:
            ValueError: the task was never submitted here.
            TimeoutError: it is not done after ``timeout`` seconds; it still runs or waits.
            RuntimeError: a task failed, ran longer than the deadline, or lost its thread; or the executor is closed.
                The message has the state of every queue. Also if this process was forked before the task had ended.
        """
        queues = self._queues()
        with queues.lock:
            if not task.done and task not in queues.pending and queues.fault is None:
                if self._forked:
                    raise RuntimeError(
                        f"This process was forked while {task.name!r} was on its way, and a fork copies no threads: "
                        "call optimizer.offload.finish() before you fork"
                    )
                raise ValueError(f"Task {task.name!r} was not submitted to this executor")
            self._block(queues, lambda: task.done, timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Block until all tasks are done. Raises as :meth:`wait` does."""
        queues = self._queues()
        with queues.lock:
            self._block(queues, lambda: not queues.pending, timeout)

    def has(self, task: Task) -> bool:
        """Whether a task was submitted, and runs, waits or is done."""
        return task.done or task in self._queues().pending

    @property
    def fault(self) -> str | None:
        """The first thing that went wrong, if anything did; no other task has started since."""
        return self._queues().fault

    def check(self) -> None:
        """Raise ``RuntimeError`` if a task has failed."""
        queues = self._queues()
        with queues.lock:
            queues.raise_fault()

    def fail(self, what: str) -> None:
        """End everything, as a task that fails does. The first fault stays."""
        queues = self._queues()
        with queues.lock:
            queues.fail(what)

    def rest(self) -> None:
        """After a fault, wait until no task runs but those beyond the deadline."""
        queues = self._queues()
        with queues.lock:
            while queues.is_busy():
                queues.changed.wait(min(POLL, max(0.0, queues.until_deadline())))

    def report(self) -> str:
        """What runs and what waits, one resource a line; at the moment of the fault if there was one."""
        queues = self._queues()
        with queues.lock:
            return queues.report()

    def is_own_thread(self) -> bool:
        """Whether the caller is a thread of this executor, which must not wait for tasks."""
        return threading.current_thread() in self._queues().threads.values()

    def close(self) -> None:
        """End the threads after what they run now. Tasks that have not started never run. May be called twice."""
        queues = self._queues()
        queues.close()
        for thread in queues.threads.values():
            if thread is not threading.current_thread():
                thread.join(self.deadline)

    def _check(self, task: Task, queues: Queues) -> None:
        if task.resource not in self.resources:
            raise ValueError(f"Invalid resource {task.resource!r} of task {task.name!r}. Must be in {self.resources}.")
        if task.start is not None or task in queues.pending:
            raise ValueError(f"Task {task.name!r} was submitted before")

    def _block(self, queues: Queues, met: Callable[[], bool], timeout: float | None) -> None:
        end = None if timeout is None else time.perf_counter() + timeout
        while True:
            queues.check_threads()
            queues.raise_fault()
            if met():
                return
            now = time.perf_counter()
            if end is not None and now >= end:
                raise TimeoutError(f"Not done after {timeout} s.\n{queues.report()}")
            if not queues.changed.wait(min(POLL, queues.until_deadline(), POLL if end is None else end - now)):
                queues.changed.notify_all()  # an interrupt may have come before the notice

    def _queues(self) -> Queues:
        if os.getpid() != self._state.process:  # a fork copies neither threads nor, in a usable state, locks
            self._start_afresh()
            self._forked = True
        return self._state

    def _start_afresh(self) -> None:
        self._state, self._forked = Queues(self.resources, self.deadline), False
        weakref.finalize(self, self._state.close)

    def __getstate__(self) -> dict[str, Any]:
        return {"resources": self.resources, "deadline": self.deadline}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
