"""Tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NAMES = {
    "adamw": "AdamW",
    "grass": "Grass",
    "galore": "GaLore",
    "apollo": "APOLLO",
    "fira": "Fira",
    "adamw8bit": "8-bit AdamW",
    "muon": "Muon",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")


def label(name: str) -> str:
    """A row's name as shown: ``grass dense dim=0`` is "Grass dense `dim=0`"."""
    name = re.sub(r"(?<=\s)[\w.]+=[\w./-]+", r"`\g<0>`", name)
    return re.sub(r"^\w+", lambda match: NAMES.get(match[0], match[0]), name)


def number(text: str, spec: str) -> str:
    """A cell of a CSV, formatted; empty where it is."""
    return format(float(text), spec) if text else ""
