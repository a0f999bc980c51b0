"""The longest trial starts first, by times that are given or that trials have shown."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from grass.sweep import run
from grass.sweep.grid import Kind, Place, expanded
from grass.sweep.journal import Journal
from grass.sweep.order import longest_first
from tests.sweep import trials

STEPS = 10
pytestmark = pytest.mark.usefixtures("fast")


def places(tmp_path: Path) -> list[Place]:
    kind = Kind(trials.follows, STEPS, tmp_path)
    return [kind.place(settings) for settings in expanded({"size": ["small", "large"], "lr": [1, 2, 3]})]


def began(place: Place, monkeypatch: pytest.MonkeyPatch, pace: float, reached: int) -> None:
    """A journal of a trial with so many seconds a step."""
    journal = Journal(place.path("jsonl"))
    monkeypatch.setattr(time, "time", lambda: 100.0)
    journal.append(start="cpu")
    for step in range(1, reached + 1):
        monkeypatch.setattr(time, "time", lambda step=step: 100.0 + step * pace)
        journal.append(step=step, loss=0.5)


def ordered(every: list[Place], given: object = None) -> list[str]:
    journals = {place.stem: Journal(place.path("jsonl")).read() for place in every}
    left = [place for place in every if len(journals[place.stem].losses) < STEPS]
    return [place.name for place in longest_first(left, every, journals, STEPS, given)]  # type: ignore[arg-type]


def test_without_times_it_is_the_order_of_the_grid(tmp_path: Path) -> None:
    every = places(tmp_path)
    assert ordered(every) == [place.name for place in every]


def test_times_of_the_first_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are as long as those that share the most settings: here the size."""
    every = places(tmp_path)
    began(every[0], monkeypatch, pace=1.0, reached=STEPS)
    began(every[3], monkeypatch, pace=5.0, reached=STEPS)
    large, small = ["size=large, lr=2", "size=large, lr=3"], ["size=small, lr=2", "size=small, lr=3"]
    assert ordered(every) == [*large, *small]


def test_a_trial_that_was_interrupted_has_less_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = places(tmp_path)
    began(every[3], monkeypatch, pace=5.0, reached=5)
    began(every[0], monkeypatch, pace=4.9, reached=9)  # about as long
    assert ordered(every)[-2:] == ["size=large, lr=1", "size=small, lr=1"]


def test_given_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = places(tmp_path)
    began(every[3], monkeypatch, pace=500.0, reached=1)  # is not asked

    def seconds(size: str, lr: int) -> float:
        return {"small": 10.0, "large": 40.0}[size] * (1 + lr)

    by_seconds = sorted(every, key=lambda p: -seconds(**p.settings) * (0.9 if p == every[3] else 1))
    assert ordered(every, seconds) == [place.name for place in by_seconds]


def test_two_devices_begin_with_the_longest(tmp_path: Path) -> None:
    """The last of the grid, and the one before it."""
    levels = [1.0, 2.0, 3.0, 4.0]
    run(
        trials.follows,
        {"level": levels},
        out=tmp_path,
        steps=1,
        devices=["cpu:0", "cpu:1"],
        seconds=lambda level: 2**level,
    )
    starts = {}
    for path in tmp_path.glob("*.jsonl"):
        journal = path.read_text().splitlines()
        starts[path.name.split("-")[0]] = float(journal[0].rsplit(":", 1)[1].rstrip("}"))
    assert sorted(starts, key=starts.__getitem__)[:2] in (["level=4.0", "level=3.0"], ["level=3.0", "level=4.0"])


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "long", True])
def test_bad_times_are_named(tmp_path: Path, seconds: object) -> None:
    trial = partial(trials.follows)
    with pytest.raises(ValueError, match=r"Invalid seconds=.* of the trial level=1.0: must be a finite number > 0"):
        run(trial, {"level": [1.0]}, out=tmp_path, steps=1, devices=["cpu:0", "cpu:1"], seconds=lambda level: seconds)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"Invalid seconds=3\.0: must be None or a function"):
        run(trial, {"level": [1.0]}, out=tmp_path, steps=1, seconds=3.0)  # type: ignore[arg-type]
