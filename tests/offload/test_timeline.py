"""Traces and plots of schedules that ran, and of simulated ones."""

from __future__ import annotations

import json
import sys

import pytest

from grass import Offload
from grass.offload.executor import Executor
from grass.offload.tasks import Task, simulate
from grass.offload.timeline import chrome_trace, plot
from tests.offload.schedules import pipeline
from tests.offload.training import build, train


def measured() -> list[Task]:
    first = Task("first", "host", 7, start=10.0, end=10.5)
    return [first, Task("second", "up", 8, (first,), start=10.5, end=10.75), Task("never", "down", 1, start=11.0)]


def test_trace(tmp_path):
    path = tmp_path / "trace.json"
    events = chrome_trace(measured(), path)
    assert json.loads(path.read_text())["traceEvents"] == events
    rows = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert rows == {"up": 0, "host": 1}
    assert [(e["name"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"] == [
        ("first", 1, 0.0, 0.5e6, {"amount": 7}),
        ("second", 0, 0.5e6, 0.25e6, {"amount": 8}),
    ]


def test_trace_of_a_simulation():
    tasks = pipeline(2, 1, 3, 1)
    spans = simulate(tasks, lambda task: task.amount)
    found = {e["name"]: (e["ts"] / 1e6, e["dur"] / 1e6) for e in chrome_trace(tasks, spans=spans) if e["ph"] == "X"}
    assert found == {task.name: (start, end - start) for task, (start, end) in spans.items()}


def test_trace_of_a_run():
    executor, tasks = Executor(), pipeline(2, 1, 1, 1)
    assert chrome_trace(tasks) == []
    executor.submit(tasks)
    executor.drain()
    executor.close()
    assert {e["name"] for e in chrome_trace(tasks) if e["ph"] == "X"} == {task.name for task in tasks}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    tasks = measured()
    plot(tasks, tmp_path / f"run.{suffix}")
    plot([], tmp_path / f"nothing.{suffix}")
    plot(tasks[:1], tmp_path / f"simulated.{suffix}", simulate(tasks[:1], lambda task: 1))
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install matplotlib"):
        plot(measured(), tmp_path / "run.png")


def test_the_last_step_of_an_optimizer(tmp_path):
    model, optimizer = build("compact", offload=Offload(_bytes_per_second=1e7))
    assert optimizer.offload is not None
    with pytest.raises(ValueError, match=r"no step to show: call optimizer.step\(\) before"):
        optimizer.offload.timeline(tmp_path / "step.json")
    train(model, optimizer, 2)
    optimizer.offload.timeline(tmp_path / "step.json")  # waits for the step
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} == {task.name for task in optimizer.offload.last_tasks}
    optimizer.offload.timeline(str(tmp_path / "step.svg"))
    assert "<svg" in (tmp_path / "step.svg").read_text()
