"""Tables about explored columns: the frontier of loss against memory, and learning rates against width."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from statistics import fmean
from typing import NamedTuple

from page_tables.markdown import table
from page_tables.source import Row, read, select, settings_of
from page_tables.study import AS_ADAMW, HORIZONS, method_name, shown

COMMON = {"lr=0.012", "scale=0.25"}
"""Settings that the rows of the frontier share."""
RATE = 0.012
"""The learning rate of the width study."""
OTHER_RATES = {str(RATE), "0.003"}
"""Learning rates of embeddings, head and norms in long runs."""
WIDTHS = {"1m": "128", "9m-wide": "320", "28m-wide": "768"}
"""Hidden size of its models."""
WIDEST = {"200m-wide": "2,048", "800m-wide": "4,096"}
"""Hidden size of models that ran on a GPU alone, with fewer rates."""
OF_THE_LAW = {"lr", "scale", "rank", "explore", "compact", "autocast"}
"""Settings in which cells of the law differ."""

LONG_RUNS = {
    "0.87 million parameters, hidden size 128": ("cells.csv", "1m", "float32"),
    "8.8 million, 320, on a GPU": ("gpu/cells.csv", "9m-wide", "bf16 autocast"),
    "29 million, 768, on a GPU": ("gpu/cells.csv", "28m-wide", "bf16 autocast"),
}
"""Where the runs of 2,150 steps are: file, model and precision."""
HEAD_OF_METHODS = [
    "method",
    "loss by seed",
    "rates of linear layers tried",
    "best",
    "other rate (worse ones)",
    "gradients + state",
]
LONG_RANKS = {"1.0": "AdamW, two rates", "0.25": "r = q = n/4", "0.125": "n/8", "0.0625": "n/16"}
LONG_METHODS = {
    ("adamw", "0.25"): "AdamW, one rate",
    **{("grass", rank): name for rank, name in LONG_RANKS.items()},
    ("recipe", "0.125"): "recipe",
    ("muon", "0.25"): "Muon, n/4",
}
"""Optimizer and rank of the columns of their table."""


def is_of_the_law(values: dict[str, str]) -> bool:
    """Whether a cell is of the law: AdamW with two rates, or compact mode with r = q and otherwise default options."""
    if (rank := values.get("rank", "0.25")) == "1.0":
        return set(values) <= OF_THE_LAW | {word.partition("=")[0] for word in AS_ADAMW}
    return "compact" in values and set(values) <= OF_THE_LAW and values.get("explore", rank) == rank


def linear_rate(values: dict[str, str]) -> float:
    """The learning rate of linear layers; in compact mode ``scale`` is ``"auto"`` where a cell names none."""
    rank = float(values.get("rank", 0.25))
    auto = 1 / (rank + float(values.get("explore", rank))) if "compact" in values else 1.0
    return float(values["lr"]) * float(values.get("scale", auto))


def frontier() -> str:
    """Loss and memory of Grass by how many columns are selected and explored."""
    groups: dict[tuple[bool, float, float], list[Row]] = {}
    for row in select("cells.csv", "pretrain & 1m & grass"):
        settings = set(row["settings"].split())
        values = dict(word.split("=") for word in settings)
        if settings >= COMMON and set(values) <= {"lr", "scale", "rank", "explore", "compact"}:
            rank, compact = float(values.get("rank", 0.25)), "compact" in values
            explore = float(values.get("explore", rank if compact else 1 - rank))
            groups.setdefault((compact, rank, explore), []).append(row)
    lines = []
    for (compact, rank, explore), cells in sorted(groups.items(), key=lambda item: (-sum(item[0][1:]), item[0])):
        memory = [f"{part:.2f}" for part in shares(cells[0], compact=compact, held=rank + explore)]
        mode, name = "compact" if compact else "dense", "all others" if rank + explore == 1 else f"{explore:g}"
        lines.append(
            [mode, f"{rank:g}", name, f"{rank + explore:g}", *(shown(final(cells, h)) for h in HORIZONS), *memory]
        )
    return table(["mode", "r / n", "q / n", "(r + q) / n", *HORIZONS.values(), "state", "gradients", "all"], lines)


def final(cells: list[Row], steps: str) -> list[float]:
    """Final losses at a horizon, in the order of the seeds."""
    return [float(c["loss_100"]) for c in sorted(cells, key=lambda c: int(c["seed"])) if c["steps"] == steps]


def shares(cell: Row, *, compact: bool, held: float) -> tuple[float, float, float]:
    """State, gradients, and weights with all, each as a share of AdamW's; ``held`` is ``(r + q) / n``.

    Of ``g`` bytes of gradients in compact mode, ``held (w - g) / (1 - held)`` belong to active rows, which are stored
    beside the ``w`` bytes of weights.
    """
    base = select("cells.csv", "@adamw")[0]
    weights, adam = int(base["gradient_bytes"]), int(base["state_bytes"])
    state, gradients = int(cell["state_bytes"]), int(cell["gradient_bytes"])
    active = held * (weights - gradients) / (1 - held) if compact else 0.0
    everything = (weights + active + gradients + state) / (2 * weights + adam)
    return state / adam, gradients / weights, everything


def width() -> str:
    """Losses after 270 steps by model, method and the rate of the projected weights, of the first seed."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for row in select("cells.csv", "pretrain & 270 & grass & seed=0"):
        values = settings_of(row)
        if values["lr"] == str(RATE) and "autocast" not in values and values.get("rank") in ("1.0", "0.125"):
            rate = RATE * float(values.get("scale", 1))
            name = method_name("grass", row["settings"])
            found.setdefault((row["model"], name), {})[rate] = float(row["loss_100"])
    rates = sorted({rate for losses in found.values() for rate in losses}, reverse=True)
    lines = []
    for model, hidden in WIDTHS.items():
        for (of, name), losses in found.items():
            if of == model:
                best = min(losses, key=losses.__getitem__)
                cells = [f"{losses[rate]:.3f}" if rate in losses else "" for rate in rates]
                marked = [f"**{c}**" if rate == best else c for rate, c in zip(rates, cells, strict=True)]
                lines.append([hidden, name, *marked])
    return table(["hidden size", "method", *(f"{rate:.2g}" for rate in rates)], lines)


def law(steps: str) -> str:
    """Losses in float32 by width, fraction and rate of the projected weights at a horizon: the study ``law``."""
    losses: dict[tuple[int, float], dict[float, list[str]]] = {}
    for row in sorted(read("cells.csv"), key=lambda row: row["seed"]):
        values = settings_of(row)
        fits = row["steps"] == steps and row["optimizer"] == "grass" and values["lr"] == str(RATE)
        if fits and "autocast" in values and is_of_the_law(values):
            fraction, rate = float(values.get("rank", 0.25)), RATE * float(values["scale"])
            of = losses.setdefault((int(WIDTHS[row["model"]]), fraction), {})
            of.setdefault(rate, []).append(f"{float(row['loss_100']):.3f}")
    rates = sorted({rate for found in losses.values() for rate in found})
    lines = []
    for (hidden, fraction), found in sorted(losses.items(), key=lambda item: (item[0][0], -item[0][1])):
        name = "AdamW, two rates" if fraction == 1 else f"{Fraction(fraction)} n"
        lines.append([str(hidden), name, *(" ".join(found.get(rate, [])) for rate in rates)])
    return table(["hidden size", "r = q", *(f"{rate:.2g}" for rate in rates)], lines)


def law_fit() -> str:
    """The best rates of ``law.csv`` as multiples of AdamW's, and the exponent that fits them."""
    shares, lines = _shares(), []
    for (hidden, steps), of in _by_width_and_horizon().items():
        left = [abs(float(row["residual"])) for row in of.values() if row["residual"]]
        fitted = [f"{float(of[1.0]['exponent']):.2f}", f"{2 ** max(left):.2f}"] if len(left) > 1 else ["", ""]
        times = [_times(of[share]) if share in of else "" for share in shares]
        lines.append([str(hidden), f"{steps:,}", _others(of), _plain(float(of[1.0]["best"])), *times, *fitted])
    shared = ["hidden size", "steps", "other parameters", "AdamW's"]
    return table([*shared, *map(_name, shares), "exponent", "off by at most a factor"], lines)


def law_losses() -> str:
    """AdamW's losses by seed at its best rate, from ``law.csv``, and what each share of the columns adds to them."""
    shares, lines = _shares(), []
    for (hidden, steps), of in _by_width_and_horizon().items():
        adamw = _losses_by_seed(of[1.0])
        line = [str(hidden), f"{steps:,}", _others(of), _mean_and_each(list(adamw.values()), "")]
        for share in shares:
            ours = _losses_by_seed(of[share]) if share in of else {}
            line.append(_mean_and_each([ours[seed] - adamw[seed] for seed in ours if seed in adamw], "+"))
        lines.append(line)
    return table(["hidden size", "steps", "other parameters", "AdamW's", *map(_name, shares)], lines)


def _by_width_and_horizon() -> dict[tuple[int, int], dict[float, Row]]:
    """The rows of ``law.csv`` of which AdamW's best rate is known, by the share that moves; where there are others."""
    groups: dict[tuple[int, int], dict[float, Row]] = {}
    for row in read("law.csv"):
        if row["times"]:
            groups.setdefault((int(row["hidden"]), int(row["steps"])), {})[float(row["moving"])] = row
    return {key: of for key, of in sorted(groups.items()) if len(of) > 1}


def _shares() -> list[float]:
    return sorted({share for of in _by_width_and_horizon().values() for share in of} - {1.0}, reverse=True)


def _others(of: dict[float, Row]) -> str:
    """The learning rates of embeddings, head and norms at which the best rates were found."""
    return ", ".join(sorted({row["other"] for row in of.values()}))


def _name(share: float) -> str:
    return f"r = q = {Fraction(share / 2)} n"


def _losses_by_seed(row: Row) -> dict[str, float]:
    return dict(zip(row["seeds"].split(), map(float, row["losses"].split()), strict=True))


def _mean_and_each(values: list[float], sign: str) -> str:
    """The mean in bold before the values of several seeds; the value of one."""
    each = " ".join(f"{value:{sign}.3f}" for value in values)
    return f"**{fmean(values):{sign}.3f}** ({each})" if len(values) > 1 else each


def _times(row: Row) -> str:
    """A multiple of AdamW's rate; a bound where the best is the largest or the smallest that was tried."""
    if row["inside"] == "True":
        return f"{float(row['times']):.1f}"
    largest = max(map(float, row["tried"].split()))
    return f"{'at least' if float(row['best']) >= 0.99 * largest else 'at most'} {float(row['times']):.1f}"


def long_runs() -> str:
    """Losses after 2,150 steps by model and method, by seed at the rate that is best with the first."""
    lines = []
    for label, (name, model, precision) in LONG_RUNS.items():
        found: dict[tuple[str, str], list[Row]] = {}
        for row in select(name, f"pretrain & {model} & steps=2150"):
            values = settings_of(row)
            of_precision = "bf16_weights" in values or ("autocast" in values) == (precision == "float32")
            if of_precision and (method := _method_of_long(row["optimizer"], values)):
                found.setdefault((method, values.get("rank", "0.25")), []).append(row)
        lines.append([f"{label}, {precision}", *(_best_of(found.get(key, [])) for key in LONG_METHODS)])
    return table(["model", *LONG_METHODS.values()], lines)


def _method_of_long(optimizer: str, values: dict[str, str]) -> str | None:
    """AdamW with one rate, a cell of the law or the same of Muon, or the recipes' precisions; ``None`` for others."""
    if "bf16_weights" in values:
        return "recipe" if values["lr"] in OTHER_RATES else None
    if optimizer == "adamw":
        return optimizer if set(values) <= {"lr", "autocast"} else None
    usual = {name: value for name, value in values.items() if name != "moment_dtype"}
    return optimizer if values["lr"] in OTHER_RATES and is_of_the_law(usual) else None


def muon() -> str:
    """Losses under AdamW and under Muon by the share of columns that train, each at the best rate of the first seed."""
    runs: dict[tuple[str, str, str], list[Row]] = {}
    for row in select("cells.csv", "pretrain & 1m"):
        values = settings_of(row)
        rank = values.get("rank", "0.25" if "compact" in values else "1.0")
        if "autocast" in values and values["lr"] == str(RATE) and is_of_the_law({**values, "rank": rank}):
            runs.setdefault((row["optimizer"], row["steps"], rank), []).append(row)
    lines = []
    for steps, horizon in HORIZONS.items():
        for rank, label in LONG_RANKS.items():
            both = [_best_of(runs.get((optimizer, steps, rank), []), steps) for optimizer in ("grass", "muon")]
            if both[1]:
                lines.append([horizon, "all columns" if rank == "1.0" else label, *both])
    return table(["", "what trains", "AdamW and Grass", "Muon"], lines)


def _best_of(rows: list[Row], steps: str = "2150") -> str:
    """The losses by seed at the best rate; with moments of 8 bits only where no others ran."""
    usual = [row for row in rows if "moment_dtype" not in settings_of(row)]
    if not (first := [row for row in usual or rows if row["seed"] == "0"]):
        return ""
    best = min(first, key=lambda row: float(row["loss_100"]))["settings"]
    note = "" if usual or "bf16_weights" in best else " (moments of 8 bits)"
    return _by_seed(final([row for row in rows if row["settings"] == best], steps)) + note


def residual_mlp() -> str:
    """Losses of the residual MLP by method and rate, in the order of the seeds."""
    return _by_method_and_rate("residual_mlp.csv")


def word_counts() -> str:
    """Losses of the classifier of word counts by method and rate, in the order of the seeds."""
    return _by_method_and_rate("word_counts.csv")


def _by_method_and_rate(name: str) -> str:
    losses = _losses(name, "method", "lr", of="loss")
    methods, rates = (list(dict.fromkeys(names)) for names in zip(*losses, strict=True))
    lines = ([method, *(_by_seed(losses[method, rate]) for rate in rates)] for method in methods)
    return table(["method", *(f"lr = {rate}" for rate in rates)], lines)


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
    def megabytes(self) -> float:
        """Gradients and optimizer state."""
        return (int(self.rows[0]["state_bytes"]) + int(self.rows[0]["gradient_bytes"])) / 1e6


def by_method(cells: list[Row]) -> dict[str, AtBest]:
    """Cells of the widest model by what they train with, the method with the lowest loss first."""
    found: dict[str, dict[tuple[float, float], list[Row]]] = {}
    for row in cells:
        values = settings_of(row)
        rates = found.setdefault(method_of_the_widest(row), {})
        rates.setdefault((float(values["lr"]), linear_rate(values)), []).append(row)
    methods = {}
    for method, rates in found.items():
        best = min(rates, key=lambda both: _of_first_seed(rates[both]))
        methods[method] = AtBest(rates, best, sorted(rates[best], key=lambda row: int(row["seed"])))
    return dict(sorted(methods.items(), key=lambda item: _of_first_seed(item[1].rows)))


def _lines_of_methods(cells: list[Row]) -> Iterator[tuple[list[str], Row]]:
    """A line of each method and the cell of its first seed."""
    for method, of in by_method(cells).items():
        other, best = of.best
        one = all(lr == rate for lr, rate in of.rates) or "scale" not in settings_of(of.rows[0])
        worse = sorted({lr for lr, _ in of.rates} - {other}) if not one else []
        line = [
            method,
            " ".join(f"{float(row['loss_100']):.3f}" for row in of.rows),
            ", ".join(_plain(rate) for rate in sorted(rate for lr, rate in of.rates if one or lr == other)),
            _plain(best),
            _plain(other) + (f" ({', '.join(map(_plain, worse))})" if worse else ""),
            f"{of.megabytes:.0f} MB",
        ]
        yield line, of.rows[0]


def _peak_and_time(row: Row) -> list[str]:
    """Peak memory of a process that trains like a cell, and the time of its step over AdamW's; empty if not measured.

    Peaks of methods other than compact mode are of r = n/4, as the cells are; their times are of n/8.
    """
    values = settings_of(row)
    name = "grass compact" if "compact" in values else "adamw" if values.get("rank") == "1.0" else row["optimizer"]
    times = {(timed["method"], timed["rank"]): float(timed["step_ms"]) for timed in read("speed_wide.csv")}
    peaks = {(of["method"], of["rank"]): f"{of['peak_mb']} MB" for of in read("peak_memory.csv")}
    rank = values.get("rank", "0.25") if "compact" in values else "0.25"
    timed_at = rank if "compact" in values else "0.125"
    time = times.get((name, timed_at))
    return [peaks.get((name, rank), ""), "" if time is None else f"{time / times['adamw', timed_at]:.2f}"]


def _of_first_seed(rows: list[Row]) -> float:
    return next((float(row["loss_100"]) for row in rows if row["seed"] == "0"), math.inf)


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


def starting_rates() -> str:
    """The best rates of linear layers by width, of AdamW with two rates and of compact mode, and where they lead.

    Those of the first seed, which ran with all rates: seeds differ by more than neighbouring rates do.
    """
    losses: dict[tuple[str, float], dict[float, float]] = {}
    for row in select("cells.csv", "pretrain & 270 & grass & seed=0"):
        values = settings_of(row)
        if values["lr"] == str(RATE) and is_of_the_law(values) and row["model"] in WIDTHS:
            of = losses.setdefault((row["model"], float(values.get("rank", 0.25))), {})
            of[RATE * float(values.get("scale", 1))] = float(row["loss_100"])
    best = {key: min(of, key=of.__getitem__) for key, of in losses.items()}
    lines = []
    for model, hidden in WIDTHS.items():
        adam, ours = best[model, 1.0], best[model, 0.125]
        times = f"{_plain(ours)}, {ours / adam:.0f} times AdamW's"
        lines.append([hidden, _plain(adam), f"{RATE:g}", _plain(4 * adam), times, "measured"])
    for model, hidden in WIDEST.items():
        tried = {linear_rate(settings_of(row)): float(row["loss_100"]) for row in _of_adamw(model)}
        adam = min(tried, key=tried.__getitem__)
        where = "the largest" if adam == max(tried) else "the best"
        basis = f"{where} of {len(tried)} tried, on a GPU"
        lines.append([hidden, _plain(adam), f"{RATE:g}", _plain(4 * adam), "not run at n/8", basis])
    heads = [
        "hidden size",
        "linear layers: `lr`",
        "embeddings, head, norms",
        'what `scale="auto"` makes of it, r = q = n/8',
        "best of those tried there",
    ]
    return table([*heads, "basis"], lines)


def _of_adamw(model: str) -> list[Row]:
    """The cells of AdamW with two rates that a GPU ran of a model."""
    return [row for row in select("gpu/cells.csv", model) if settings_of(row).get("rank") == "1.0"]


def _plain(rate: float) -> str:
    """A rate with two digits and without an exponent."""
    return f"{float(f'{rate:.2g}'):.7f}".rstrip("0")


def balanced() -> str:
    """Losses of columns that take turns, beside those of columns that are drawn anew at each refresh, by seed."""
    losses = _losses("balanced.csv", "fraction", "precision", "selection")
    cells = (
        [f"{Fraction(fraction)} n", precision, f"`{rule}`", _by_seed(values), f"{fmean(values):.3f}"]
        for (fraction, precision, rule), values in losses.items()
    )
    return table(["r = q", "precision", "columns are selected by", "loss by seed", "mean"], cells)


def patched() -> str:
    """Losses at the full horizon of patches that are not part of the package, beside the package's, by seed."""
    losses = _losses("patched.csv", "what", "update_interval")
    cells = ([what, interval, _by_seed(values)] for (what, interval), values in losses.items())
    return table(["what", "`update_interval`", "loss by seed"], cells)


def reach_by_horizon() -> str:
    """Losses by how far explored columns move, times the default, and by the length of the run."""
    losses = _losses("reach_by_horizon.csv", "steps", "times")
    times = sorted({factor for _, factor in losses}, key=float)
    lengths = sorted({steps for steps, _ in losses}, key=int)
    cells = ([f"{int(n):,}", *(_by_seed(losses.get((n, factor), [])) for factor in times)] for n in lengths)
    return table(["steps", *(f"{Fraction(factor)} of the default" for factor in times)], cells)


def sharing() -> str:
    """Losses of layers that draw the same columns, beside those of layers that draw by themselves."""
    losses = _losses("sharing.csv", "fraction", "drawn", of="loss")
    cells = ([f"{Fraction(fraction)} n", drawn, _by_seed(values)] for (fraction, drawn), values in losses.items())
    return table(["r = q", "columns are drawn by", "loss"], cells)


def _losses(name: str, *keys: str, of: str = "loss_100") -> dict[tuple[str, ...], list[float]]:
    """The losses of a CSV that agree in these columns, in the order of its rows."""
    losses: dict[tuple[str, ...], list[float]] = {}
    for row in read(name):
        losses.setdefault(tuple(row[key] for key in keys), []).append(float(row[of]))
    return losses


def _by_seed(losses: list[float]) -> str:
    return " ".join(f"{loss:.3f}" for loss in losses)
