"""Ctrl-C at any line on the stand-in: training goes on as if the part was done, or never begun.

Backward is left out: the thread that Ctrl-C interrupts waits in C++ until it is over, because torch runs the operators
of a device in a thread of their own.
"""

from __future__ import annotations

import pytest

from tests.accelerator import standin

standin.install()

from tests.fuzz.interrupts import Case, outcomes  # noqa: E402
from tests.fuzz.test_interrupts import CASES, _small, check  # noqa: E402, F401

ON_DEVICE = [case._replace(device="standin:0") for case in CASES if case.part != "backward"]
QUICK = [
    case for case in ON_DEVICE if str(case) in ("step, compact, offload 0.5", "forward, compact, offload 0, streamed")
]


def interrupt(case: Case, times: int) -> None:
    """Interrupt a case at so many lines, in one order of the device's work after another."""
    standin.seed_order(0)
    check(case, *outcomes(case, times))
    assert not standin.end()


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_an_interrupt(case: Case) -> None:
    interrupt(case, 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_DEVICE, ids=str)
def test_an_interrupt_at_many_lines(case: Case) -> None:
    interrupt(case, 20)
