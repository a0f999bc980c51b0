"""One thread per resource runs a schedule of :mod:`grass.offload.tasks` beside the caller."""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from grass.machine.rates import RESOURCES
from grass.offload.tasks import Task, check_order

POLL = 0.5
"""Seconds after which a waiting caller looks whether the threads still live."""
AT_EXIT = 5.0
"""Seconds that the end of the process waits for tasks that run."""
SHOWN = 5
"""Tasks of a queue that a report names."""


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

    def _check(self, task: Task, queues: TaskQueues) -> None:
        if task.resource not in self.resources:
            raise ValueError(f"Invalid resource {task.resource!r} of task {task.name!r}. Must be in {self.resources}.")
        if task.start is not None or task in queues.pending:
            raise ValueError(f"Task {task.name!r} was submitted before")

    def _block(self, queues: TaskQueues, met: Callable[[], bool], timeout: float | None) -> None:
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

    def _queues(self) -> TaskQueues:
        if os.getpid() != self._state.process:  # a fork copies neither threads nor, in a usable state, locks
            self._start_afresh()
            self._forked = True
        return self._state

    def _start_afresh(self) -> None:
        self._state, self._forked = TaskQueues(self.resources, self.deadline), False
        weakref.finalize(self, self._state.close)

    def __getstate__(self) -> dict[str, Any]:
        return {"resources": self.resources, "deadline": self.deadline}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class TaskQueues:
    """The queues of one executor, guarded by one lock: ``with queues.lock: ...``.

    Threads refer to this object, not to the executor. The executor can be garbage-collected while they wait.

    ``KeyboardInterrupt`` may come at any line of the thread that calls. It leaves the lock free and the queues whole.

    Attributes:
        lock: guards everything below.
        process: which process the threads belong to.
        changed: notified whenever a task ends or something else below changes.
        pending: all tasks that have not ended.
        threads: by resource.
        fault: the first thing that went wrong, with the report of that moment.
    """

    def __init__(self, resources: tuple[str, ...], deadline: float) -> None:
        self.deadline = deadline
        self.process = os.getpid()
        self.lock = threading.RLock()  # entered by C code, between whose steps nothing interrupts
        self.changed = threading.Condition(self.lock)
        self.pending: set[Task] = set()
        self.threads: dict[str, threading.Thread] = {}
        self.fault: str | None = None
        self._cause: BaseException | None = None
        self._waiting: dict[str, deque[Task]] = {resource: deque() for resource in resources}
        self._running: dict[str, Task] = {}
        self._ended: set[str] = set()  # an interrupt in Thread.is_alive() makes living threads count as dead

    def append(self, tasks: list[Task]) -> None:
        """Queue tasks, and start the threads that they need. If this is interrupted, all are queued or none is."""
        for resource in {task.resource for task in tasks}:
            self._start(resource)
        waiting = {resource: deque(queue) for resource, queue in self._waiting.items()}
        for task in tasks:
            task.after = tuple(other for other in task.after if not other.done)
            waiting[task.resource].append(task)
        pending = self.pending.union(tasks)
        self.pending, self._waiting = pending, waiting  # no call between the two: nothing interrupts
        self.changed.notify_all()

    def _start(self, resource: str) -> None:
        """Start the thread of a resource, unless it was started before."""
        if not self.threads:
            atexit.register(_end, weakref.ref(self))
        thread = self.threads.get(resource)
        if thread is None or thread.ident is None:  # an interrupt came before its start
            thread = threading.Thread(target=self._run, args=(resource,), name=f"grass-{resource}", daemon=True)
            self.threads[resource] = thread
            thread.start()

    def close(self) -> None:
        """End the threads after what they run now. The garbage collector may call this, even in a forked child."""
        if os.getpid() == self.process:
            with self.lock:
                self.fail("The executor is closed")

    def end(self) -> None:
        """Start no other task, and give those that run some seconds: a thread inside torch aborts an ending process."""
        if os.getpid() == self.process:
            with self.lock:
                self.fail("The process ends")
                self.changed.wait_for(lambda: not self._running, AT_EXIT)

    def fail(self, what: str, cause: BaseException | None = None) -> None:
        """Keep the first fault: no other task starts, and whoever waits is told."""
        if self.fault is None:
            self.fault, self._cause = f"{what}.\n{self.report()}", cause
            for queue in self._waiting.values():
                for task in queue:
                    task.work = None  # never runs; it would keep the executor's owner alive, and so itself
        self.changed.notify_all()

    def raise_fault(self) -> None:
        """Raise ``RuntimeError`` if there was a fault."""
        if self.fault is not None:
            raise RuntimeError(self.fault) from self._cause

    def check_threads(self) -> None:
        """Note a fault if a thread has died or a task runs longer than the deadline."""
        for resource in self._ended:
            if self.fault is None:
                self.fail(f"The thread of {resource!r} died")
        if self.until_deadline() <= 0:
            late = min(self._running.values(), key=lambda task: task.start or 0.0)
            self.fail(f"Task {late.name!r} on {late.resource!r} runs for more than {self.deadline} s")

    def until_deadline(self) -> float:
        """Seconds until a running task reaches the deadline; infinite if none runs."""
        starts = [task.start for task in self._running.values() if task.start is not None]
        return min(starts, default=float("inf")) + self.deadline - time.perf_counter()

    def is_busy(self) -> bool:
        """Whether a task runs that has not reached the deadline."""
        return bool(self._running) and self.until_deadline() > 0

    def report(self) -> str:
        """What runs and what waits, one resource a line; at the moment of the fault if there was one."""
        return self.fault or "\n".join(f"  {resource}: {self._describe(resource)}" for resource in self._waiting)

    def _describe(self, resource: str) -> str:
        running, queue = self._running.get(resource), self._waiting[resource]
        now = "idle" if running is None else f"runs {running.name!r}"
        if running is not None and running.start is not None:
            now += f" for {time.perf_counter() - running.start:.1f} s"
        names = [_name(task) for task in list(queue)[:SHOWN]]
        more = [f"{len(queue) - SHOWN} more"] if len(queue) > SHOWN else []
        return f"{now}; {len(queue)} waiting" + (f": {', '.join(names + more)}" if names else "")

    @torch.no_grad()
    def _run(self, resource: str) -> None:
        """The life of a thread."""
        if self.threads.get(resource) is not threading.current_thread():  # another was started in its place
            return
        try:
            while (task := self._take(resource)) is not None:
                if task.work is not None:
                    task.work()
                self._finish(task)
        except BaseException as error:  # SystemExit too: a thread that ends in silence leaves others waiting
            running = self._running.get(resource)
            what = f"The thread of {resource!r}" if running is None else f"Task {running.name!r} on {resource!r}"
            with self.lock:
                self.fail(f"{what} failed: {error!r}", error)
                self._running.pop(resource, None)
            if running is not None:
                running.work = None
            traceback.clear_frames(error.__traceback__)  # they too would keep it alive
        finally:
            with self.lock:
                self._ended.add(resource)
                self.changed.notify_all()

    def _take(self, resource: str) -> Task | None:
        """The next task, once all that it waits for are done; ``None``: end the thread."""
        with self.lock:
            while self.fault is None:
                queue = self._waiting[resource]
                if queue and all(other.done for other in queue[0].after):
                    task = self._running[resource] = queue.popleft()
                    task.start = time.perf_counter()
                    return task
                self.changed.wait()
        return None

    def _finish(self, task: Task) -> None:
        with self.lock:
            task.work = None
            task.end = time.perf_counter()
            del self._running[task.resource]
            self.pending.remove(task)
            self.changed.notify_all()


def _end(reference: weakref.ref[TaskQueues]) -> None:
    if (queues := reference()) is not None:
        queues.end()


def _name(task: Task) -> str:
    others = [repr(other.name) for other in task.after if not other.done]
    return repr(task.name) + (f" (after {', '.join(others)})" if others else "")
