"""Tables of memory."""

from __future__ import annotations

import contextlib
import io
from fractions import Fraction
from statistics import fmean
from typing import Any

import torch

from grass.memory import Setting, plan
from grass.memory.models import load_architecture
from page_tables.markdown import table
from page_tables.source import Row, read, select

SIZES = ("1b", "7b", "13b")
USUAL = "checkpointing=True & refresh=False"
COLUMNS: dict[str, tuple[str, str]] = {
    "Grass": ("Grass", f"{USUAL} & explore=as rank"),
    "sketch": ("Grass", "checkpointing=True & refresh=True"),
    "explore=0": ("Grass", f"{USUAL} & explore=0"),
    "not checkpointed": ("Grass", "checkpointing=False"),
    "n/8, 8-bit": ("Grass", f"{USUAL} & explore=0.03125"),
    "int8": ("Grass int8", USUAL),
    "int8, sketch": ("Grass int8", "checkpointing=True & refresh=True"),
    "AdamW": ("AdamW", USUAL),
    "8-bit AdamW": ("8-bit AdamW", USUAL),
    "LoRA": ("LoRA", USUAL),
    "GaLore": ("GaLore", USUAL),
}
"""What a column of the tables shows: the method, and which of its rows."""

ADAMW = {"AdamW, all in bfloat16": "AdamW", "AdamW, float32 masters and moments": "AdamW float32"}
"""Rows of AdamW by their method in the planner."""

LOSSES: dict[str, dict[tuple[float, float], str]] = {
    "loss above AdamW's, float32": {(1 / 4, 1 / 4): "@768-4", (1 / 8, 1 / 8): "@768-8", (1 / 16, 1 / 16): "@768-16"},
    "bfloat16, 8-bit moments": {(1 / 8, 1 / 32): "@768-recipe"},
}
"""Columns of losses, and the cells of the study by shares of the columns."""

TIMES_ADAMW = ("inputs_times_adamw", "times_adamw")
"""Columns of ``saved_activations.csv``."""

PLANNED_ROWS = ("weights", "active rows", "gradients", "moments", "activations", "peak", "fits", "largest rank")


def case(size: str, name: str) -> Row:
    """The row of ``memory.csv`` for a model and a column."""
    method, selector = COLUMNS[name]
    (row,) = select("memory.csv", f"model={size} & method={method} & {selector}")
    return row


def memory() -> str:
    """AdamW against Grass, by category; host memory where the CSV has it."""
    with_host = "host_gb" in read("memory.csv")[0]
    header = ["", "AdamW", "Grass: weights and active rows", "gradients", "state"]
    header += [*(["host"] if with_host else []), "**peak**", "planned", "int8, 8-bit state", "n/8, 8-bit state"]
    rows = []
    for size in SIZES:
        grass = case(size, "Grass")
        names = ["weights_and_active_rows_gb", "gradients_gb", "moments_gb", *(["host_gb"] if with_host else [])]
        values = [gigabytes(grass[name]) for name in names]
        rows.append([f"LLaMA {size}", gigabytes(case(size, "AdamW")["peak_gb"]), *values])
        rows[-1] += [f"**{gigabytes(grass['peak_gb'])}**", gigabytes(grass["planned_peak_gb"])]
        rows[-1] += [gigabytes(case(size, other)["peak_gb"]) for other in ("int8", "n/8, 8-bit")]
    return table(header, rows)


def planned() -> str:
    """Tracked over planned peak of every case."""
    sizes = dict.fromkeys(row["model"] for row in read("memory.csv"))
    rows = ([size, *(f"{float(case(size, name)['tracked_over_planned']):.3f}" for name in COLUMNS)] for size in sizes)
    return table(["", *COLUMNS], rows)


def gigabytes(text: str) -> str:
    """A size; nothing is "0"."""
    return f"{float(text):.2f} GB" if float(text) else "0"


def planner() -> str:
    """What the planner prints for one model, without the rows that this model does not need."""
    from grass.memory.__main__ import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["--model", "7b", "--rank", "192", "--gpu", "24GB"])
    block = out.getvalue().split("\n\n")[1]
    shown = [line for line in block.splitlines() if line.startswith((" " * 20, *PLANNED_ROWS))]
    return "\n".join(["```text", *shown, "```"])


def saved_activations() -> str:
    """What a block saves for backward, times what it saves under AdamW."""
    rows = read("saved_activations.csv")[1:]
    cells = ([f"{Fraction(row['share'])} n", *(f"{float(row[key]):.2f}" for key in TIMES_ADAMW)] for row in rows)
    return table(["r = q", "inputs of linear layers", "the whole block"], cells)


SHARES = (
    (1 / 4, 1 / 4),
    (1 / 4, 1 / 16),
    (1 / 8, 1 / 8),
    (1 / 8, 1 / 32),
    (1 / 16, 1 / 16),
    (1 / 20, 1 / 20),
    (1 / 32, 1 / 32),
)
"""Selected and explored columns of all."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32 rows and moments": {"active_dtype": torch.float32},
    "bfloat16 rows": {"active_dtype": torch.bfloat16},
    "bfloat16 rows, 8-bit moments": {"active_dtype": torch.bfloat16, "moment_dtype": "8bit"},
}
"""How precise active rows and moments are."""


def planned_shares() -> str:
    """Gigabytes that the planner gives for shares of the columns and precisions, beside AdamW; and what losses say."""
    models = {size: load_architecture(size) for size in ("7b", "13b")}
    header = ["r / n", "q / n", *(f"{size.upper()}, {name}" for size in models for name in PRECISIONS), *LOSSES]

    def gigabytes_of(method: str, **shares: float) -> list[str]:
        settings = [Setting(**shares, **precision) for precision in PRECISIONS.values()]
        return [f"{plan(method, m, setting).total / 1e9:.1f}" for m in models.values() for setting in settings]

    lines = [
        [
            *(str(Fraction(share).limit_denominator(64)) for share in shares),
            *gigabytes_of("Grass", rank=shares[0], explore=shares[1]),
            *(above_adamw(of[shares]) if shares in of else "" for of in LOSSES.values()),
        ]
        for shares in SHARES
    ]
    for name, method in ADAMW.items():
        totals = [f"{plan(method, m, Setting()).total / 1e9:.1f}" for m in models.values()]
        cells = [cell for total in totals for cell in (total, *[""] * (len(PRECISIONS) - 1))]
        lines.append([name, "", *cells, *[""] * len(LOSSES)])
    return table(header, lines)


def above_adamw(alias: str) -> str:
    """How much higher a method's loss is than that of AdamW with two rates, seed by seed: mean, lowest and highest."""
    theirs = _by_seed("@768-two-rates")
    more = [loss - theirs[seed] for seed, loss in _by_seed(alias).items()]
    return f"{fmean(more):.3f} ({min(more):.3f} to {max(more):.3f})"


def _by_seed(alias: str) -> dict[str, float]:
    return {row["seed"]: float(row["loss_100"]) for row in select("gpu/cells.csv", alias)}


def planned_sharded() -> str:
    """Tracked peak of one of several devices, and over the planned one."""
    found: dict[str, dict[str, str]] = {}
    for row in read("memory_sharded.csv"):
        cell = f"{gigabytes(row['peak_gb'])} ({float(row['tracked_over_planned']):.3f})"
        found.setdefault(f"LLaMA {row['model']}", {})[row["method"]] = cell
    methods = next(iter(found.values()))
    return table(["", *methods], ([size, *(cells[m] for m in methods)] for size, cells in found.items()))
