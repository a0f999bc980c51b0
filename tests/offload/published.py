"""The published model of Deep Optimizer States (Maurya et al., 2024): an update's time by the device's share."""

from __future__ import annotations

from grass.machine.rates import Machine

MOVED_BYTES = 12
"""Bytes of an element that the device updates, each way: float32 master weight and two moments."""
WEIGHT_BYTES = 2
"""Bytes of an element that the host updates, on the way up: the new weight in half precision."""


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
