"""Tables about finetuning: compact mode beside adapters."""

from __future__ import annotations

from fractions import Fraction
from statistics import fmean

from page_tables.markdown import table
from page_tables.source import Row, read, settings_of
from page_tables.study import mean

STUDY = "adapters in float32"
"""The study's name in the grid."""
TASKS = {"facts": "new facts", "instruct": "docstrings", "classify": "packages"}
ADAPTERS = {"lora": "LoRA", "dora": "DoRA", "rslora": "rsLoRA"}
HEAD = ["task", "method", "trained", "state + gradients", "rates tried", "best", "loss", "accuracy"]


def adapters() -> str:
    """Each method at the best of its learning rates, under bf16 autocast: what trains, what is held, what is known.

    Only projected weights train, as with adapters. Losses are those of all seeds; accuracy and loss on other text are
    means.
    """
    return table([*HEAD, "loss on other text"], _lines(float32=False))


def adapters_float32() -> str:
    """The same table in float32, from a base model made in float32, with the tracked peak of a step."""
    peaks = {(row["task"], row["method"]): row["peak_mb"] for row in read("tracked_memory.csv")}
    titles = {title: task for task, title in TASKS.items()}
    lines = [
        [*line[:4], f"{float(peaks[titles[line[0]], line[1]]):.0f} MB", *line[4:]] for line in _lines(float32=True)
    ]
    return table([*HEAD[:4], "peak", *HEAD[4:], "loss on other text"], lines)


def embeddings_too() -> str:
    """The same table with embeddings and norms trained too, in float32."""
    return table([*HEAD, "loss on other text"], _lines(float32=True, all_train=True))


def _lines(*, float32: bool, all_train: bool = False) -> list[list[str]]:
    found: dict[tuple[str, str], dict[float, list[Row]]] = {}
    for row in read("cells.csv"):
        values = settings_of(row)
        if row["task"] in TASKS and ("only_projected" in values, "autocast" in values) == (not all_train, float32):
            rates = found.setdefault((row["task"], method(row["optimizer"], row["settings"])), {})
            rates.setdefault(float(values["lr"]), []).append(row)
    lines = []
    for task, title in TASKS.items():
        tried = [(name, rates) for (of, name), rates in found.items() if of == task]
        for name, rates in sorted(tried, key=lambda item: mean(item[1][_best(item[1])])):
            lines.append([title, name, *_cells(rates)])
    return lines


def _best(rates: dict[float, list[Row]]) -> float:
    """The best rate of the first seed, which ran with all; or that with the lowest mean, of as many seeds or more."""
    first = min(rates, key=lambda rate: min(float(row["loss_100"]) for row in rates[rate] if row["seed"] == "0"))
    return min((rate for rate in rates if len(rates[rate]) >= len(rates[first])), key=lambda rate: mean(rates[rate]))


def _cells(rates: dict[float, list[Row]]) -> list[str]:
    best = _best(rates)
    rows = sorted(rates[best], key=lambda row: int(row["seed"]))
    held = (int(rows[0]["state_bytes"]) + int(rows[0]["gradient_bytes"])) / 1e6
    return [
        f"{int(rows[0]['trained']) / 1e3:,.0f} k",
        f"{held:.1f} MB",
        ", ".join(f"{rate:g}" for rate in sorted(rates)),
        f"{best:g}",
        " ".join(f"{float(row['loss_100']):.3f}" for row in rows),
        f"{fmean(float(row['accuracy']) for row in rows):.3f}",
        f"{fmean(float(row['pretraining_loss']) for row in rows):.3f}" if rows[0]["pretraining_loss"] else "",
    ]


def method(optimizer: str, settings: str) -> str:
    """The name of a finetuning method, whatever its learning rate."""
    values = settings_of({"settings": settings})
    share = Fraction(values.get("rank", "0.25"))
    if "adapter" in values:
        return f"{ADAPTERS[values['adapter']]}, rank {values['adapter_rank']}"
    if optimizer == "galore":
        return "GaLore, r = n / 4"
    if optimizer == "adamw":
        return "AdamW" if float(values["lr"]) else "no training"
    if "compact" not in values:
        return f"Grass dense, r = {share} n"
    if values.get("explore") == "0":
        return f"Grass compact, r = {share} n, drawn once"
    return f"Grass compact, r = q = {share} n"
