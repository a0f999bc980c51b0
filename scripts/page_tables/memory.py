"""Tables of memory."""

from __future__ import annotations

import contextlib
import io
from fractions import Fraction

from page_tables.markdown import table
from page_tables.source import Row, read, select

SIZES = ("1b", "7b", "13b")
USUAL = "checkpointing=True & refresh=False"
COLUMNS: dict[str, tuple[str, str]] = {
    "Grass": ("Grass", f"{USUAL} & explore=as rank"),
    "sketch": ("Grass", "checkpointing=True & refresh=True"),
    "explore=0": ("Grass", f"{USUAL} & explore=0"),
    "not checkpointed": ("Grass", "checkpointing=False"),
    "int8": ("Grass int8", USUAL),
    "int8, sketch": ("Grass int8", "checkpointing=True & refresh=True"),
    "AdamW": ("AdamW", USUAL),
    "8-bit AdamW": ("8-bit AdamW", USUAL),
    "LoRA": ("LoRA", USUAL),
    "GaLore": ("GaLore", USUAL),
}
"""What a column of the tables shows: the method, and which of its rows."""

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
    header += [*(["host"] if with_host else []), "**peak**", "planned", "int8, 8-bit state"]
    rows = []
    for size in SIZES:
        grass = case(size, "Grass")
        names = ["weights_and_active_rows_gb", "gradients_gb", "moments_gb", *(["host_gb"] if with_host else [])]
        values = [gigabytes(grass[name]) for name in names]
        rows.append([f"LLaMA {size}", gigabytes(case(size, "AdamW")["peak_gb"]), *values])
        rows[-1] += [f"**{gigabytes(grass['peak_gb'])}**", gigabytes(grass["planned_peak_gb"])]
        rows[-1] += [gigabytes(case(size, "int8")["peak_gb"])]
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
