"""Pictures of a schedule, measured or simulated: a trace for Perfetto or ``chrome://tracing``, and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grass.extras import optional
from grass.machine.rates import RESOURCES
from grass.offload.tasks import Task

Spans = Mapping[Task, tuple[float, float]]
"""Start and end of tasks in seconds: :func:`grass.offload.tasks.simulate`."""


def save(tasks: Iterable[Task], path: str | os.PathLike[str]) -> None:
    """Write a trace if the file's name ends in ``.json``, else draw a picture.

    Args:
        tasks: those that have run.
        path: ``step.json`` for Perfetto or ``chrome://tracing``; ``step.png``, ``.svg`` or ``.pdf`` for a picture.

    Raises:
        ImportError: a picture needs Matplotlib.
        ValueError: no task has ended; or Matplotlib does not know the format.
    """
    tasks = list(tasks)
    if not any(task.done for task in tasks):
        raise ValueError("There is no step to show: call optimizer.step() before")
    if Path(path).suffix == ".json":
        chrome_trace(tasks, path)
    else:
        plot(tasks, path)


def chrome_trace(
    tasks: Iterable[Task], path: str | os.PathLike[str] | None = None, spans: Spans | None = None
) -> list[dict[str, Any]]:
    """Events in the Trace Event Format, one row a resource, times in microseconds after the first start.

    Args:
        tasks: the schedule. Tasks that have not ended are left out.
        path: where to write the events as JSON; ``None``: nowhere.
        spans: simulated times; ``None``: those that the executor measured.
    """
    found = _spans(tasks, spans)
    rows = _rows(found)
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": resource}}
        for resource, row in rows.items()
    ]
    for task, (start, end) in found.items():
        place = {"ph": "X", "pid": 0, "tid": rows[task.resource], "ts": start * 1e6, "dur": (end - start) * 1e6}
        events.append({"name": task.name, "cat": task.resource, **place, "args": {"amount": task.amount}})
    if path is not None:
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return events


def plot(tasks: Iterable[Task], path: str | os.PathLike[str], spans: Spans | None = None) -> None:
    """Draw a bar for each task, one row a resource, and save the figure in the format of the file's name.

    Args:
        tasks: the schedule. Tasks that have not ended are left out.
        path: where to save it.
        spans: simulated times; ``None``: those that the executor measured.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    figure = optional("matplotlib.figure", "A plot of a schedule").Figure(
        figsize=(9, 0.8 + 0.5 * len(RESOURCES)), layout="constrained"
    )
    draw(figure.subplots(), tasks, spans)
    figure.savefig(path)


def draw(axes: Any, tasks: Iterable[Task], spans: Spans | None = None) -> None:
    """Draw a bar for each task into ``axes`` of Matplotlib, one row a resource.

    Args:
        axes: where.
        tasks: the schedule. Tasks that have not ended are left out.
        spans: simulated times; ``None``: those that the executor measured.
    """
    found = _spans(tasks, spans)
    rows = _rows(found)
    edge = min(0.5, 30 / max(len(found), 1))  # edges of many thin bars would cover them
    for resource, row in rows.items():
        bars = [(start, end - start) for task, (start, end) in found.items() if task.resource == resource]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=f"C{row}", edgecolor="white", linewidth=edge)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")


def _spans(tasks: Iterable[Task], spans: Spans | None) -> dict[Task, tuple[float, float]]:
    """Times of tasks after the first start."""
    found: dict[Task, tuple[float, float]] = {}
    for task in tasks:
        if spans is not None and task in spans:
            found[task] = spans[task]
        elif spans is None and task.start is not None and task.end is not None:
            found[task] = task.start, task.end
    first = min((start for start, _ in found.values()), default=0.0)
    return {task: (start - first, end - first) for task, (start, end) in found.items()}


def _rows(tasks: Iterable[Task]) -> dict[str, int]:
    """A row for each resource: the usual ones in their order, then others."""
    used = {task.resource: None for task in tasks}
    names = [*(name for name in RESOURCES if name in used), *(name for name in used if name not in RESOURCES)]
    return {name: row for row, name in enumerate(names)}
