"""Tables of every method on the widest model: loss, memory and time at the best of its rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from statistics import fmean
from typing import NamedTuple

from page_tables.law import linear_rate, mean_and_each, plain
from page_tables.markdown import table
from page_tables.source import Row, read, select, settings_of
from page_tables.study import method_name

HEAD_OF_METHODS = [
    "method",
    "loss by seed",
    "rates of linear layers tried",
    "best",
    "other rate (worse ones)",
    "gradients + state",
]


def widest() -> str:
    """Every method on the widest model, at the best of its rates of the linear layers: loss, memory and time."""
    rows = select("cells.csv", "pretrain & 270 & model=28m-wide")
    lines = ([*line, *_peak_and_time(first)] for line, first in _lines_of_methods(rows))
    return table([*HEAD_OF_METHODS, "peak", "step time"], lines)


def long_methods() -> str:
    """Every method after 2,150 steps on the widest model, on a GPU."""
    rows = select("gpu/cells.csv", "pretrain & 2150 & model=28m-wide")
    return table(HEAD_OF_METHODS, (line for line, _ in _lines_of_methods(rows)))


class AtBest(NamedTuple):
    """A method's cells by both of its rates, of other parameters and of linear layers, and those at the best of them.

    The best rates are those of the first seed, which ran with all. ``rows`` are in the order of the seeds.
    """

    rates: dict[tuple[float, float], list[Row]]
    best: tuple[float, float]
    rows: list[Row]

    @property
    def losses(self) -> list[float]:
        """Held out, at the end of each seed's run."""
        return [float(row["loss_100"]) for row in self.rows]

    @property
    def megabytes(self) -> float:
        """Gradients and optimizer state."""
        return (int(self.rows[0]["state_bytes"]) + int(self.rows[0]["gradient_bytes"])) / 1e6


def by_method(cells: list[Row]) -> dict[str, AtBest]:
    """Cells of the widest model by what they train with, the lowest mean of their losses first; none of float32."""
    found: dict[str, dict[tuple[float, float], list[Row]]] = {}
    for row in filter(computes_in_bf16, cells):
        values = settings_of(row)
        rates = found.setdefault(method_of_the_widest(row), {})
        rates.setdefault((float(values["lr"]), linear_rate(values)), []).append(row)
    methods = {}
    for method, rates in found.items():
        best = min(rates, key=lambda both: _of_first_seed(rates[both]))
        methods[method] = AtBest(rates, best, sorted(rates[best], key=lambda row: int(row["seed"])))
    return dict(sorted(methods.items(), key=lambda item: fmean(item[1].losses)))


def _lines_of_methods(cells: list[Row]) -> Iterator[tuple[list[str], Row]]:
    """A line of each method and the cell of its first seed."""
    for method, of in by_method(cells).items():
        other, best = of.best
        one = all(lr == rate for lr, rate in of.rates) or "scale" not in settings_of(of.rows[0])
        worse = sorted({lr for lr, _ in of.rates} - {other}) if not one else []
        line = [
            method,
            mean_and_each(of.losses),
            ", ".join(plain(rate) for rate in sorted(rate for lr, rate in of.rates if one or lr == other)),
            plain(best),
            plain(other) + (f" ({', '.join(map(plain, worse))})" if worse else ""),
            f"{of.megabytes:.0f} MB",
        ]
        yield line, of.rows[0]


def _peak_and_time(row: Row) -> list[str]:
    """Peak memory of a process that trains like a cell, and the time of its step over AdamW's; empty where unknown."""
    values = settings_of(row)
    name = "adamw" if values.get("rank") == "1.0" else row["optimizer"] + " compact" * ("compact" in values)
    times = {(timed["method"], timed["rank"]): float(timed["step_ms"]) for timed in read("speed_wide.csv")}
    peaks = {(of["method"], of["rank"]): f"{of['peak_mb']} MB" for of in read("peak_memory.csv")}
    rank = values.get("rank", "0.25") if "compact" in values else "0.25"
    time = times.get((name, rank))
    return [peaks.get((name, rank), ""), "" if time is None else f"{time / times['adamw', rank]:.2f}"]


def _of_first_seed(rows: list[Row]) -> float:
    return next((float(row["loss_100"]) for row in rows if row["seed"] == "0"), math.inf)


def computes_in_bf16(row: Row) -> bool:
    """Whether a cell's matrix products are in bfloat16."""
    values = settings_of(row)
    return values.get("autocast") != "False" or "bf16_weights" in values


def method_of_the_widest(row: Row) -> str:
    """What a cell of the widest model trains with; of compact mode with its fractions."""
    name, values = method_name(row["optimizer"], row["settings"]), settings_of(row)
    if "compact" not in values:
        return name
    rank, explore = (Fraction(values.get(key, values.get("rank", "0.25"))) for key in ("rank", "explore"))
    shares = f"r = q = {rank} n" if rank == explore else f"r = {rank} n, q = {explore} n"
    notes = {"bf16_weights": ", bf16, 8-bit moments", "selection": ", columns in turn"}
    one = ", one rate" if "scale" not in values else ""
    return f"{name}, {shares}{one}" + "".join(note for key, note in notes.items() if key in values)
