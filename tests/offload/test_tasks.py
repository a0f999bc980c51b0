"""The simulator against a clock that ticks and closed forms; legal orders against all permutations."""

from __future__ import annotations

import itertools
from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grass.offload.tasks import Task, makespan, simulate
from tests.offload.schedules import legal_next, legal_orders, pipeline, run_in_order, schedules, tick_by_tick


def amount(task: Task) -> float:
    return task.amount


@given(schedules())
def test_simulator_against_a_ticking_clock(tasks):
    expected = tick_by_tick(tasks)
    assert simulate(tasks, amount) == expected
    assert makespan(tasks, amount) == max((end for _, end in expected.values()), default=0)


@given(schedules())
def test_a_schedule_takes_as_long_as_each_resource_and_no_longer_than_all(tasks):
    busy = Counter[str]()
    for task in tasks:
        busy[task.resource] += task.amount
    assert max(busy.values(), default=0) <= makespan(tasks, amount) <= busy.total()


@pytest.mark.parametrize("units", [1, 2, 7])
@pytest.mark.parametrize("lengths", [(3, 1, 2), (1, 3, 2), (2, 1, 3), (2, 2, 2), (0, 5, 0)])
def test_pipeline_closed_form(units, lengths):
    """Equal units: the first passes all stages, then the slowest stage ends one unit after another."""
    assert makespan(pipeline(units, *lengths), amount) == sum(lengths) + (units - 1) * max(lengths)


def test_no_tasks():
    assert simulate([], amount) == {}
    assert makespan([], amount) == 0


def test_task_before_what_it_waits_for():
    first = Task("first", "host", 1)
    second = Task("second", "up", 1, (first,))
    with pytest.raises(ValueError, match=r"'second' comes before 'first'"):
        simulate([second, first], amount)
    with pytest.raises(ValueError, match=r"'second' is in a list without 'first'"):
        simulate([second], amount)
    with pytest.raises(ValueError, match=r"'first' is in the list twice"):
        simulate([first, second, first], amount)
    with pytest.raises(ValueError, match=r"'second' comes before 'first'"):
        legal_orders([second, first])
    first.start, first.end = 0.0, 1.0  # done in an earlier step
    assert makespan([second], amount) == 1


@pytest.mark.parametrize("length", [-1.0, float("nan")])
def test_negative_time(length):
    with pytest.raises(ValueError, match="Invalid time of task 'copy'"):
        simulate([Task("copy", "down", 1)], lambda task: length)


def is_legal(order: tuple[Task, ...], tasks: list[Task]) -> bool:
    for i, task in enumerate(order):
        if not set(task.after) <= set(order[:i]):
            return False
    by_resource = [[t for t in order if t.resource == r] for r in {t.resource for t in tasks}]
    return all(queue == sorted(queue, key=tasks.index) for queue in by_resource)


@given(schedules(max_size=6))
def test_legal_orders_are_all_there_are(tasks):
    legal = {order for order in itertools.permutations(tasks) if is_legal(order, tasks)}
    found = list(legal_orders(tasks))
    assert set(found) == legal
    assert len(found) == len(legal)


@given(schedules(), st.data())
def test_run_in_any_order(tasks, data):
    ran = []
    for task in tasks:
        task.work = lambda task=task: ran.append(task)
    order = run_in_order(tasks, lambda ready: data.draw(st.sampled_from(ready)))
    assert order == ran
    assert sorted(order, key=tasks.index) == tasks
    assert is_legal(tuple(order), tasks)


def race(choose) -> torch.Tensor:
    """Two units through one buffer; the second copy down does not wait until the first was read."""
    buffer, seen = torch.zeros(1), torch.zeros(2)
    tasks: list[Task] = []
    for i in range(2):
        down = Task(f"down {i}", "down", 4, work=lambda i=i: buffer.fill_(i + 1))
        tasks += down, Task(f"host {i}", "host", 1, (down,), lambda i=i: seen[i].copy_(buffer[0]))
    run_in_order(tasks, choose)
    return seen


def test_orders_reveal_a_race():
    assert race(lambda ready: ready[0]).tolist() == [1, 2]
    assert race(lambda ready: ready[-1]).tolist() == [2, 2]


def test_choice_must_be_legal():
    tasks = pipeline(1, 1, 1, 1)
    assert legal_next(tasks, set()) == tasks[:1]
    with pytest.raises(ValueError, match="'up 0' may not run now; may run: down 0"):
        run_in_order(tasks, lambda ready: tasks[2])


def test_work_needs_no_gradients():
    modes = []
    run_in_order([Task("t", "host", 0, work=lambda: modes.append(torch.is_grad_enabled()))], lambda ready: ready[0])
    assert modes == [False]
