"""Ctrl-C at any line of a step, a forward or a backward: training goes on as if the part was done, or never begun."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from grass import Offload
from grass.offload import host_storage
from grass.streaming import host_block
from tests.fuzz.interrupts import EXACT, MIXED, Case, outcomes

HOST, BOTH = Offload(), Offload(fraction=0.5)
CASES = [
    Case("full", "step"),
    Case("dense", "step"),
    Case("compact", "step"),
    Case("full", "step", HOST),
    Case("dense", "step", HOST),
    Case("compact", "step", HOST),
    Case("compact", "step", BOTH),
    Case("over bf16", "step", HOST),
    Case("over bf16", "step", Offload(masters=True)),
    Case("over int8", "step", HOST),
    Case("full", "forward", HOST),
    Case("compact", "forward", HOST),
    Case("compact", "save", HOST),
    Case("compact", "step", HOST, {}),
    Case("compact", "step", HOST, {}, files=True),
    Case("compact", "step", None, {}),
    Case("compact", "forward", HOST, {}),
    Case("compact", "forward", HOST, {}, files=True),
    Case("compact", "backward", HOST, {}),
    Case("full", "backward", HOST, {"offload_activations": True}),
    Case("compact", "microbatches", HOST, {}),
    Case("full", "microbatches", None, {}),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files for tensors as small as these models'; nothing is logged for each of many models."""
    monkeypatch.setattr(host_storage, "SMALLEST", 1)
    monkeypatch.setattr(host_block, "SMALLEST", 1)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def check(case: Case, counts: Counter[str], seen: list[str]) -> None:
    """The resident step may have stepped some parameters, as those of torch may; the others are whole or nothing."""
    fine = {EXACT, MIXED} if case.part == "step" and case.offload is None else {EXACT}
    assert counts.keys() <= fine, "\n".join(seen[:20])


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    """Of what is streamed, one case is quick: the step's."""
    return (pytest.mark.slow,) if case.stream is not None and (case.part != "step" or case.files) else ()


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in CASES])
def test_an_interrupt(case: Case) -> None:
    check(case, *outcomes(case, times=4))


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_interrupt_at_any_line(case: Case) -> None:
    check(case, *outcomes(case))
