"""Tables about finetuning: compact mode beside adapters."""

from __future__ import annotations

from fractions import Fraction
from statistics import fmean

from page_tables.markdown import table
from page_tables.source import Row, read, settings_of
from page_tables.study import mean

STUDY = "adapters in float32"
"""Its name in the grid."""
TASKS = {"facts": "new facts", "instruct": "docstrings", "classify": "packages"}
ADAPTERS = {"lora": "LoRA", "dora": "DoRA", "rslora": "rsLoRA"}


def adapters() -> str:
    """Each method at the best of its learning rates: what trains, what is held, and what the model then knows.

    Only projected weights and a classifier's head train, as with adapters. Losses are those of all seeds; accuracy and
    loss on other text are means.
    """
    found: dict[tuple[str, str], dict[float, list[Row]]] = {}
    for row in read("cells.csv"):
        if {"autocast=False", "only_projected=True"} <= {*row["settings"].split()}:
            rates = found.setdefault((row["task"], method(row["optimizer"], row["settings"])), {})
            rates.setdefault(float(settings_of(row)["lr"]), []).append(row)
    peaks = {(row["task"], row["method"]): row["peak_mb"] for row in read("finetuning_memory.csv")}
    lines = []
    for task, title in TASKS.items():
        tried = [(name, rates) for (of, name), rates in found.items() if of == task]
        for name, rates in sorted(tried, key=lambda item: min(map(mean, item[1].values()))):
            lines.append([title, name, *_cells(rates, peaks.get((task, name), ""))])
    head = ["task", "method", "trained", "state + gradients", "peak", "rates tried", "best", "loss", "accuracy"]
    return table([*head, "loss on other text"], lines)


def _cells(rates: dict[float, list[Row]], peak: str) -> list[str]:
    best = min(rates, key=lambda rate: mean(rates[rate]))
    rows = sorted(rates[best], key=lambda row: int(row["seed"]))
    held = (int(rows[0]["state_bytes"]) + int(rows[0]["gradient_bytes"])) / 1e6
    return [
        f"{int(rows[0]['trained']) / 1e3:,.0f} k",
        f"{held:.1f} MB",
        peak and f"{float(peak):.0f} MB",
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
