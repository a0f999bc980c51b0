"""Ctrl-C at any line of a resident step that selects rows: moments stay with their rows, and training goes on."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.fuzz import interrupts
from tests.fuzz.interrupts import BEFORE, ROOT, Case, Loop, at_line

MODES = ["dense", "compact", "over bf16", "over int8"]


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PLACES", (f"{ROOT}/",))


def lines_of(case: Case) -> int:
    return len(at_line(0, Loop(case).prepare())[0])


def assert_whole(loop: Loop) -> None:
    """Every weight has moments of the rows that it selects, and active rows are the weight's."""
    layers = loop.optimizer.layers()
    for group in loop.optimizer.param_groups:
        for p in group["params"]:
            state = loop.optimizer.state[p]
            if id(p) in layers:
                layer = layers[id(p)]
                assert torch.equal(state["indices"], layer.selected)
                assert layer.holds_active()
                assert len(layer.chosen.unique()) == len(layer.chosen)
            if "indices" in state:
                assert state["exp_avg"].shape[state["dim"]] == len(state["indices"])
            assert all(torch.isfinite(value).all() for value in state.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", range(3))
def test_training_goes_on(mode: str, part: int, caplog: pytest.LogCaptureFixture) -> None:
    """At lines all over the step: those of a third of the step each."""
    case = Case(mode, "step")
    count = lines_of(case)
    for number in range(1 + part * count // 3, (part + 1) * count // 3, max(1, count // 45)):
        loop = Loop(case)
        lines, error = at_line(number, loop.prepare())
        assert isinstance(error, KeyboardInterrupt)
        loop.optimizer.zero_grad()
        caplog.clear()
        saved = copy.deepcopy(loop.optimizer.state_dict())
        loop.train(BEFORE + 1, 1)
        assert_whole(loop)
        said = [r.getMessage() for r in caplog.records if "at full rank" not in r.getMessage()]
        assert all("interrupted" in text for text in said), (lines[-1], said)
        other = Loop(case)
        other.model.load_state_dict(loop.model.state_dict())
        other.optimizer.load_state_dict(saved)


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    case = Case("compact", "step")
    loop, number = Loop(case), 3 * lines_of(case) // 4
    at_line(number, loop.prepare())
    caplog.clear()
    loop.optimizer.zero_grad()
    loop.train(BEFORE + 1, 3)
    assert sum("the last step was interrupted" in record.getMessage() for record in caplog.records) == 1
