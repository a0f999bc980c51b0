"""The published fraction against a linear program, and our search against the published model's limit."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from scipy.optimize import linprog

from grass.machine.rates import Machine
from grass.offload.fraction import best_fraction, predicted
from grass.offload.tasks import Task
from tests.offload.published import published_fraction, published_step

RATES = st.floats(0.01, 100)


def minimum(machine: Machine) -> tuple[float, float]:
    """The fraction that minimizes ``T(f)`` for one parameter, and ``T``: minimize t with every term at most t."""
    u, up, down, device = (1 / r for r in (machine.host_rate, machine.up_rate, machine.down_rate, machine.device_rate))
    slopes = [(-u, u), (10 * up, 2 * up), (12 * down, 0.0), (device, 0.0)]
    left, right = [[slope, -1] for slope, _ in slopes], [-at_0 for _, at_0 in slopes]
    solved = linprog(c=[0, 1], A_ub=left, b_ub=right, bounds=[(0, 1), (0, None)])
    return solved.x[0], solved.fun


@given(RATES, RATES, st.floats(1, 10), st.floats(1, 10))
def test_published_fraction_minimizes_the_published_time(host, up, down, device):
    machine = Machine(host, up * down, up, up / 12 * device)
    fraction, seconds = minimum(machine)
    assert published_fraction(machine) == pytest.approx(fraction, abs=1e-6)
    assert published_step(published_fraction(machine), 1, machine) == pytest.approx(seconds, rel=1e-6)


@given(RATES, RATES, RATES, RATES)
def test_published_fraction_is_too_large_where_its_assumption_fails(host, down, up, device):
    machine = Machine(host, down, up, device)
    fraction, seconds = minimum(machine)
    assert published_fraction(machine) >= fraction - 1e-6
    assert published_step(published_fraction(machine), 1, machine) >= seconds * (1 - 1e-6)


def test_published_by_hand():
    """U = 1, B = 12: the host takes (1 - f) s, the link (10 f + 2) / 12 s, equal at f = 5/11."""
    machine = Machine(1.0, 12.0, 12.0, 100.0)
    assert published_fraction(machine) == pytest.approx(5 / 11)
    assert published_step(5 / 11, 3, machine) == pytest.approx(3 * 6 / 11)
    assert published_step(0, 3, machine) == 3
    assert published_step(1, 3, machine) == 3
    assert published_step(0.5, 1, Machine(1.0, 2.0, 12.0, 100.0)) == 3  # copies down
    assert published_step(0.5, 1, Machine(1.0, 12.0, 12.0, 0.1)) == 5  # the device
    assert published_fraction(Machine(1.0, 1.0, 1.0, 1.0)) == 0
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="Invalid fraction="):
            published_step(fraction, 1, machine)


def subgroups(fraction: float, count: int = 400) -> list[Task]:
    """One parameter in equal subgroups, of which the device takes every 1 / fraction-th."""
    tasks: list[Task] = []
    for i in range(count):
        if int((i + 1) * fraction + 1e-9) > int(i * fraction + 1e-9):
            up = Task(f"state {i}", "up", 12 / count)
            step = Task(f"step {i}", "device", 1 / count, (up,))
            tasks += up, step, Task(f"back {i}", "down", 12 / count, (step,))
        else:
            step = Task(f"step {i}", "host", 1 / count)
            tasks += step, Task(f"weight {i}", "up", 2 / count, (step,))
    return tasks


@pytest.mark.parametrize("rates", [(1, 12, 12, 100), (1, 30, 20, 10), (1, 1, 1, 1), (1, 24, 24, 24), (1, 400, 400, 50)])
def test_many_subgroups_approach_the_published_time(rates):
    machine = Machine(*map(float, rates))
    for fraction, seconds in predicted(subgroups, machine).items():
        assert published_step(fraction, 1, machine) <= seconds * (1 + 1e-9)
        assert seconds <= published_step(fraction, 1, machine) * 1.05
    assert best_fraction(subgroups, machine) == pytest.approx(published_fraction(machine), abs=0.05)


def flat(times: dict[float, float]):
    return lambda fraction: [Task("t", "host", times[fraction])]


def test_best_fraction():
    machine = Machine(1.0, 1.0, 1.0, 1.0)
    times = {0.0: 2.0, 0.25: 1.009, 0.5: 1.0, 0.75: 1.005, 1.0: 3.0}
    assert best_fraction(flat(times), machine, times) == 0.25
    assert best_fraction(flat(times), machine, reversed(times)) == 0.25
    assert predicted(flat(times), machine, times) == times
    assert best_fraction(flat({0.0: 1.02, 1.0: 1.0}), machine, (0.0, 1.0)) == 1.0
    with pytest.raises(ValueError, match="Must hold a fraction"):
        best_fraction(flat(times), machine, ())
