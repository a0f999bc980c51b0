"""Tables about finetuning: compact mode beside adapters."""

from __future__ import annotations

from fractions import Fraction
from statistics import fmean

from page_tables.markdown import table
from page_tables.source import Row, read, settings_of
from page_tables.study import mean

TASKS = {"instruct": "docstrings", "facts": "new facts"}
ADAPTERS = {"lora": "LoRA", "dora": "DoRA", "rslora": "rsLoRA"}


def adapters() -> str:
    """Each method at the best of its learning rates: what trains, what is held, and what the model then knows.

    Only projected weights train, as with adapters. Losses are those of all seeds; accuracy and loss on other text are
    means.
    """
    found: dict[tuple[str, str], dict[float, list[Row]]] = {}
    for row in read("cells.csv"):
        if "only_projected=True" in row["settings"].split():
            rates = found.setdefault((row["task"], _method(row)), {})
            rates.setdefault(float(settings_of(row)["lr"]), []).append(row)
    lines = []
    for task, title in TASKS.items():
        tried = [(method, rates) for (of, method), rates in found.items() if of == task]
        for method, rates in sorted(tried, key=lambda item: min(map(mean, item[1].values()))):
            lines.append([title, method, *_cells(rates)])
    head = ["task", "method", "trained", "state + gradients", "rates tried", "best", "loss", "accuracy"]
    return table([*head, "loss on other text"], lines)


def _cells(rates: dict[float, list[Row]]) -> list[str]:
    best = min(rates, key=lambda rate: mean(rates[rate]))
    rows = sorted(rates[best], key=lambda row: int(row["seed"]))
    held = (int(rows[0]["state_bytes"]) + int(rows[0]["gradient_bytes"])) / 1e6
    return [
        f"{int(rows[0]['trained']) / 1e3:,.0f} k",
        f"{held:.1f} MB",
        ", ".join(f"{rate:g}" for rate in sorted(rates)),
        f"{best:g}",
        " ".join(f"{float(row['loss_100']):.3f}" for row in rows),
        *(f"{fmean(float(row[name]) for row in rows):.3f}" for name in ("accuracy", "pretraining_loss")),
    ]


def _method(row: Row) -> str:
    values = settings_of(row)
    if "adapter" in values:
        return f"{ADAPTERS[values['adapter']]}, rank {values['adapter_rank']}"
    if row["optimizer"] == "galore":
        return "GaLore, r = n / 4"
    if row["optimizer"] == "adamw":
        return "AdamW" if float(values["lr"]) else "no training"
    share = Fraction(values.get("rank", "0.25"))
    if values.get("explore") == "0":
        return f"Grass compact, r = {share} n, drawn once"
    return f"Grass compact, r = q = {share} n"
