"""Which share of the updates the device takes: the published formula, and the optimum of our own schedule.

Offloaded state can also be updated on the device: its master weights and moments are copied there and back. That spends
bandwidth of the link to save time of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from grass.offload.machine import Machine
from grass.offload.tasks import Task, simulate

MOVED_BYTES = 12
"""Bytes of an element that the device updates, each way: float32 master weight and two moments."""
WEIGHT_BYTES = 2
"""Bytes of an element that the host updates, on the way up: the new weight in half precision."""
GRID = tuple(i / 20 for i in range(21))
TIE = 0.01
"""Relative difference up to which predicted times count as equal."""


def published_step(fraction: float, parameters: float, machine: Machine) -> float:
    """Seconds of an update of which the device takes a fraction, after Deep Optimizer States (arXiv 2410.21316).

    There are ``P`` parameters. The device updates the fraction ``f`` of them. ``U`` and ``U_d`` are updates per second
    of host and device; ``B_up`` and ``B_down`` are bytes per second to the device and from it. Everything overlaps, so
    the slowest resource decides::

        T(f) = max{ (1 - f) P / U,  [12 f + 2 (1 - f)] P / B_up,  12 f P / B_down,  f P / U_d }

    Args:
        fraction: in [0, 1].
        parameters: how many.
        machine: the rates.

    Raises:
        ValueError: the fraction is out of range.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid {fraction=}. Must be in [0, 1].")
    host = 1 - fraction
    return parameters * max(
        host / machine.host_rate,
        (MOVED_BYTES * fraction + WEIGHT_BYTES * host) / machine.up_rate,
        MOVED_BYTES * fraction / machine.down_rate,
        fraction / machine.device_rate,
    )


def published_fraction(machine: Machine) -> float:
    """The fraction at which host and link take equally long in :func:`published_step`, cut to [0, 1].

    .. math:: f^* = \\frac{1/U - 2/B}{1/U + 10/B}, \\qquad B = B_{up}

    It minimizes ``T`` if copies down and the device's updates are not slower than copies up: ``12 / B_down`` and
    ``1 / U_d`` at most ``12 / B_up``. Otherwise it is too large. It is 0 where the link is so slow that even the host's
    new weights take longer than their update, ``2 / B > 1 / U``.
    """
    host, link = 1 / machine.host_rate, 1 / machine.up_rate
    fraction = (host - WEIGHT_BYTES * link) / (host + (MOVED_BYTES - WEIGHT_BYTES) * link)
    return max(0.0, fraction)


def predicted(
    build: Callable[[float], list[Task]], machine: Machine, grid: Iterable[float] = GRID
) -> dict[float, float]:
    """Seconds of a schedule for each fraction of a grid, simulated.

    Args:
        build: makes the schedule in which the device takes this fraction of the updates.
        machine: the rates.
        grid: the fractions.
    """
    return {fraction: simulate(build(fraction), machine.seconds).makespan for fraction in grid}


def best_fraction(build: Callable[[float], list[Task]], machine: Machine, grid: Iterable[float] = GRID) -> float:
    """The fraction of a grid whose schedule is fastest; the smallest of those within 1% of the fastest.

    Args:
        build: makes the schedule in which the device takes this fraction of the updates.
        machine: the rates.
        grid: the fractions.

    Raises:
        ValueError: the grid is empty.
    """
    times = predicted(build, machine, grid)
    if not times:
        raise ValueError("Invalid grid=(). Must hold a fraction.")
    fastest = min(times.values())
    return min(fraction for fraction, seconds in times.items() if seconds <= fastest * (1 + TIE))
