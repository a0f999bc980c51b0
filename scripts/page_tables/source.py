"""Measured values by reference: ``train_step.csv: grass compact: times_adamw`` is one cell of a CSV in benchmarks/.

A reference names a file, a row and a column. The row is given by values joined with ``&``. Each is ``column=value``, or
a value that some column of the row has; ``@dense`` and others stand for a method of the study. ``mean loss_100``
averages the column over all rows that match, and ``count loss_100`` counts them; otherwise exactly one row must match.
Rows that match either of two are ``A & B | C & D``.
An expression holds references in brackets: ``[a.csv: x: ms] / [a.csv: y: ms]``.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from statistics import fmean

LONG_320 = "task=pretrain & model=9m-wide & steps=2150"
LONG_768 = "task=pretrain & model=28m-wide & steps=2150"
PRETRAIN = "task=pretrain & model=1m"
ALIASES = {
    "@adamw": f"{PRETRAIN} & optimizer=adamw & settings=lr=0.002",
    "@two-rates": f"{PRETRAIN} & optimizer=grass & settings=lr=0.024 rank=1.0 update_interval=1000000 scale=0.125 "
    "selection=top_r dim=auto state_policy=reset explore=0",
    "@float32-two-rates": f"{PRETRAIN} & optimizer=grass & settings=lr=0.012 rank=1.0 update_interval=1000000 "
    "scale=0.125 selection=top_r dim=auto state_policy=reset explore=0 autocast=False",
    "@float32-compact-4": f"{PRETRAIN} & optimizer=grass & settings=lr=0.012 scale=0.125 explore=0.25 compact=True "
    "autocast=False",
    "@dense": f"{PRETRAIN} & optimizer=grass & settings=lr=0.012 scale=0.25",
    "@balanced-4": f"{PRETRAIN} & settings=lr=0.012 scale=0.25 selection=balanced explore=0.25 compact=True",
    "@compact-4": f"{PRETRAIN} & optimizer=grass & settings=lr=0.012 scale=0.25 explore=0.25 compact=True",
    "@compact-8": f"{PRETRAIN} & optimizer=grass & settings=lr=0.012 rank=0.125 scale=0.25 explore=0.125 compact=True",
    "@wide-two-rates": "task=pretrain & model=28m-wide & settings=lr=0.012 rank=1.0 update_interval=1000000 "
    "scale=0.015625 selection=top_r dim=auto state_policy=reset explore=0",
    "@wide-16-auto": "task=pretrain & model=28m-wide & "
    "settings=lr=0.012 rank=0.0625 scale=0.125 explore=0.0625 compact=True",
    "@wide-16": "task=pretrain & model=28m-wide & settings=lr=0.012 rank=0.0625 scale=0.25 explore=0.0625 compact=True",
    "@wide-4": "task=pretrain & model=28m-wide & settings=lr=0.012 scale=0.0625 explore=0.25 compact=True",
    "@wide-8": "task=pretrain & model=28m-wide & settings=lr=0.012 rank=0.125 scale=0.125 explore=0.125 compact=True",
    "@wide-32": "task=pretrain & model=28m-wide & "
    "settings=lr=0.012 rank=0.03125 scale=0.5 explore=0.03125 compact=True",
    "@wide-64": "task=pretrain & model=28m-wide & "
    "settings=lr=0.012 rank=0.015625 scale=0.5 explore=0.015625 compact=True",
    "@wide-dense": "task=pretrain & model=28m-wide & optimizer=grass & settings=lr=0.012 scale=0.0625",
    "@wide-galore": "task=pretrain & model=28m-wide & optimizer=galore & "
    "settings=lr=0.012 update_interval=50 scale=0.125",
    "@wide-apollo": "task=pretrain & model=28m-wide & optimizer=apollo & "
    "settings=lr=0.012 update_interval=50 scale=0.0078125",
    "@wide-whole-muon": "task=pretrain & model=28m-wide & optimizer=muon & settings=lr=0.012 scale=0.25",
    "@wide-fira": "task=pretrain & model=28m-wide & optimizer=fira & settings=lr=0.006 update_interval=50 scale=1.0",
    "@wide-bytes-adamw": "task=pretrain & model=28m-wide & optimizer=adamw8bit & settings=lr=0.0005",
    "@long-wide-8": "task=pretrain & model=9m-wide & settings=lr=0.012 rank=0.09375 update_interval=100 scale=0.25 "
    "selection=balanced explore=0.03125 compact=True",
    "@long-wide-2": "task=pretrain & model=9m-wide & "
    "settings=lr=0.012 scale=0.0625 explore=0.25 moment_dtype=8bit compact=True",
    "@long-wide-4": "task=pretrain & model=9m-wide & "
    "settings=lr=0.012 rank=0.125 scale=0.125 explore=0.125 compact=True",
    "@bytes-8bit": f"{PRETRAIN} & settings=lr=0.012 rank=0.109375 scale=0.5 explore=0.03125 moment_dtype=8bit "
    "stochastic_rounding=True compact=True autocast=False bf16_weights=True",
    "@bytes-float32": f"{PRETRAIN} & settings=lr=0.012 rank=0.03125 scale=1.0 explore=0.03125 compact=True "
    "active_dtype=float32 autocast=False bf16_weights=True",
    "@long-wide-two-rates": "task=pretrain & model=9m-wide & settings=lr=0.012 rank=1.0 update_interval=1000000 "
    "scale=0.03125 selection=top_r dim=auto state_policy=reset explore=0",
    "@320-two-rates": f"{LONG_320} & settings=lr=0.012 rank=1.0 update_interval=1000000 scale=0.0625 selection=top_r "
    "dim=auto state_policy=reset explore=0",
    "@320-4": f"{LONG_320} & settings=lr=0.012 scale=0.0625 explore=0.25 compact=True",
    "@320-8": f"{LONG_320} & settings=lr=0.012 rank=0.125 scale=0.5 explore=0.125 compact=True",
    "@320-16": f"{LONG_320} & settings=lr=0.012 rank=0.0625 scale=0.5 explore=0.0625 compact=True",
    "@768-two-rates": f"{LONG_768} & settings=lr=0.003 rank=1.0 update_interval=1000000 scale=0.125 selection=top_r "
    "dim=auto state_policy=reset explore=0",
    "@768-one-adamw": f"{LONG_768} & optimizer=adamw & settings=lr=0.00025",
    "@768-4": f"{LONG_768} & optimizer=grass & settings=lr=0.003 scale=0.25 explore=0.25 compact=True",
    "@768-8": f"{LONG_768} & optimizer=grass & settings=lr=0.003 rank=0.125 scale=0.5 explore=0.125 compact=True",
    "@768-16": f"{LONG_768} & optimizer=grass & settings=lr=0.003 rank=0.0625 scale=1.0 explore=0.0625 compact=True",
    "@768-recipe": f"{LONG_768} & settings=lr=0.003 rank=0.125 scale=0.5 explore=0.03125 moment_dtype=8bit "
    "stochastic_rounding=True compact=True autocast=False bf16_weights=True",
    "@768-turns-4": f"{LONG_768} & settings=lr=0.003 scale=0.25 selection=balanced explore=0.25 compact=True",
    "@768-turns-8": f"{LONG_768} & settings=lr=0.003 rank=0.125 scale=0.5 selection=balanced explore=0.125 "
    "compact=True",
    "@768-turns-16": f"{LONG_768} & settings=lr=0.003 rank=0.0625 scale=1.0 selection=balanced explore=0.0625 "
    "compact=True",
    "@768-muon-whole": f"{LONG_768} & optimizer=muon & settings=lr=0.003 scale=0.5",
    "@768-muon-4": f"{LONG_768} & optimizer=muon & settings=lr=0.003 scale=0.5 explore=0.25 compact=True",
    "@768-muon-8": f"{LONG_768} & optimizer=muon & settings=lr=0.003 rank=0.125 scale=1.0 explore=0.125 compact=True",
    "@768-bytes-adamw": f"{LONG_768} & optimizer=adamw8bit & settings=lr=0.00025",
    "@768-galore": f"{LONG_768} & optimizer=galore & settings=lr=0.003 scale=0.25",
    "@768-apollo": f"{LONG_768} & optimizer=apollo & settings=lr=0.003 scale=0.5",
    "@768-one-4": f"{LONG_768} & optimizer=grass & settings=lr=0.0005 explore=0.25 compact=True",
    "@768-one-8": f"{LONG_768} & optimizer=grass & settings=lr=0.0005 rank=0.125 explore=0.125 compact=True",
    "@facts-adamw": "task=facts & optimizer=adamw & settings=lr=0.004 autocast=False only_projected=True",
    "@facts-dense": "task=facts & optimizer=grass & settings=lr=0.008 autocast=False only_projected=True",
    "@facts-4": "task=facts & settings=lr=0.004 explore=0.25 compact=True autocast=False only_projected=True",
    "@facts-8": "task=facts & "
    "settings=lr=0.002 rank=0.125 explore=0.125 compact=True autocast=False only_projected=True",
    "@facts-lora": "task=facts & settings=lr=0.004 autocast=False adapter=lora adapter_rank=20 only_projected=True",
    "@facts-rslora": "task=facts & settings=lr=0.002 autocast=False adapter=rslora adapter_rank=20 only_projected=True",
    "@facts-wider": "task=facts & settings=lr=0.004 autocast=False adapter=lora adapter_rank=48 only_projected=True",
    "@all-facts-dense": "task=facts & optimizer=grass & settings=lr=0.004 autocast=False",
    "@all-facts-8": "task=facts & settings=lr=0.004 rank=0.125 explore=0.125 compact=True autocast=False",
    "@all-facts-adamw": "task=facts & optimizer=adamw & settings=lr=0.004 autocast=False",
    "@all-facts-lora": "task=facts & settings=lr=0.004 autocast=False adapter=lora adapter_rank=20",
    "@all-docs-dense": "task=instruct & optimizer=grass & settings=lr=0.004 autocast=False",
    "@all-docs-8": "task=instruct & settings=lr=0.002 rank=0.125 explore=0.125 compact=True autocast=False",
    "@all-docs-adamw": "task=instruct & optimizer=adamw & settings=lr=0.002 autocast=False",
    "@all-docs-lora": "task=instruct & settings=lr=0.004 autocast=False adapter=lora adapter_rank=20",
    "@docs-dense": "task=instruct & optimizer=grass & settings=lr=0.008 autocast=False only_projected=True",
    "@docs-lora": "task=instruct & settings=lr=0.008 autocast=False adapter=lora adapter_rank=20 only_projected=True",
    "@docs-adamw": "task=instruct & optimizer=adamw & settings=lr=0.002 autocast=False only_projected=True",
    "@docs-4": "task=instruct & settings=lr=0.002 explore=0.25 compact=True autocast=False only_projected=True",
    "@docs-8": "task=instruct & "
    "settings=lr=0.002 rank=0.125 explore=0.125 compact=True autocast=False only_projected=True",
    "@packages-adamw": "task=classify & optimizer=adamw & settings=lr=0.001 autocast=False only_projected=True",
    "@packages-8": "task=classify & "
    "settings=lr=0.001 rank=0.125 explore=0.125 compact=True autocast=False only_projected=True",
    "@packages-lora": "task=classify & "
    "settings=lr=0.004 autocast=False adapter=lora adapter_rank=20 only_projected=True",
    "@galore": f"{PRETRAIN} & optimizer=galore & settings=lr=0.012 update_interval=50",
    "@apollo": f"{PRETRAIN} & optimizer=apollo & settings=lr=0.012 update_interval=50",
    "@bank": f"{PRETRAIN} & optimizer=grass & settings=lr=0.012 update_interval=25 scale=0.25 "
    "selection=multinomial_norm state_policy=bank",
}
"""Methods of the quality study, each at its best learning rates; ``@bank`` has Grass's former defaults."""

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Row = dict[str, str]


@cache
def read(name: str) -> list[Row]:
    """The rows of a CSV, by its name in benchmarks/ or benchmarks/quality/."""
    path = next((p for p in (BENCHMARKS / name, BENCHMARKS / "quality" / name) if p.exists()), None)
    if path is None:
        raise ValueError(f"There is no benchmarks/{name}")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def select(name: str, selector: str) -> list[Row]:
    """The rows that a selector matches.

    Raises:
        ValueError: no row matches.
    """
    for alias, meaning in ALIASES.items():
        selector = selector.replace(alias, meaning)
    every = [alternative.split(" & ") for alternative in selector.split(" | ")]
    found = [row for row in read(name) if any(all(_matches(row, part.strip()) for part in parts) for parts in every)]
    if not found:
        raise ValueError(f"No row of {name} matches {selector!r}")
    return found


def settings_of(row: Row) -> dict[str, str]:
    """The settings of a cell of the study by name."""
    return dict(word.split("=", 1) for word in row["settings"].split())


def value(reference: str) -> float:
    """The number that a reference names.

    Raises:
        ValueError: file, row or column do not exist, or several rows match.
    """
    name, _, rest = reference.partition(": ")
    selector, _, column = rest.rpartition(": ")
    rows = select(name, selector)
    how, _, column = column.rpartition(" ")
    if len(rows) > 1 and not how:
        raise ValueError(f"{len(rows)} rows of {name} match {selector!r}")
    if column not in rows[0]:
        raise ValueError(f"{name} has no column {column!r}")
    return {"": fmean, "mean": fmean, "count": len}[how]([float(row[column]) for row in rows])


def evaluate(expression: str) -> float:
    """An expression of references in brackets; a single reference needs none."""
    if "[" not in expression:
        return value(expression)
    numbers = re.sub(r"\[([^]]+)\]", lambda match: repr(value(match[1])), expression)
    return eval(numbers, {"__builtins__": {}, "abs": abs, "min": min, "max": max})


def _matches(row: Row, part: str) -> bool:
    column, equals, wanted = part.partition("=")
    return row[column] == wanted if equals and column in row else part in row.values()
