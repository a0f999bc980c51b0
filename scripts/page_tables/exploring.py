"""Tables about explored columns: the frontier of loss against memory, long runs, and variations."""

from __future__ import annotations

from fractions import Fraction
from statistics import fmean

from page_tables.law import OTHER_RATES, RATE, WIDTHS, is_of_the_law
from page_tables.markdown import table
from page_tables.source import Row, read, select, settings_of
from page_tables.study import HORIZONS, method_name, shown

COMMON = {"lr=0.012", "scale=0.25"}
"""Settings that the rows of the frontier share."""
LONG_RUNS = {
    "0.87 million parameters, hidden size 128": ("cells.csv", "1m", "float32"),
    "8.8 million, 320, on a GPU": ("gpu/cells.csv", "9m-wide", "bf16 autocast"),
    "29 million, 768, on a GPU": ("gpu/cells.csv", "28m-wide", "bf16 autocast"),
}
"""Where the runs of 2,150 steps are: file, model and precision."""
LONG_RANKS = {"1.0": "AdamW, two rates", "0.25": "r = q = n/4", "0.125": "n/8", "0.0625": "n/16"}
LONG_METHODS = {
    ("adamw", "0.25"): "AdamW, one rate",
    **{("grass", rank): name for rank, name in LONG_RANKS.items()},
    ("recipe", "0.125"): "recipe",
    ("muon", "0.25"): "Muon, n/4",
}
"""Optimizer and rank of the columns of their table."""


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
