"""What works with what, from the answers that ``tests/pairs`` checks by training with every pair of features."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parents[2] / "tests" / "pairs" / "outcomes.csv"
NAMES = {
    "compile": "`torch.compile`",
    "checkpointing": "gradient checkpointing",
    "step_in_backward": "`step_in_backward`",
    "attach": "`grass.attach`",
}
"""Features that the pages call otherwise than the tests."""
NOT_ASKED = "–"
WORKS = ("equal", "trains")
Row = dict[str, str]


def support() -> str:
    """A table of all pairs for each mode, and one of the errors."""
    every = rows()
    tables = [table for mode in modes(every) for table in (f"**{mode.capitalize()} mode**", pairs_of(every, mode))]
    return "\n\n".join([*tables, "**Errors**", errors(every)])


def rows() -> list[Row]:
    """The answers of all pairs."""
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def modes(every: list[Row]) -> list[str]:
    """Dense and compact."""
    return list(dict.fromkeys(row["mode"] for row in every))


def pairs_of(every: list[Row], mode: str) -> str:
    """A square of answers."""
    answers = {frozenset((row["feature"], row["beside"])): row["answer"] for row in every if row["mode"] == mode}
    features = list(dict.fromkeys(row["feature"] for row in every if row["mode"] == mode))
    lines = [f"| | {' | '.join(map(called, features))} |", "|---" * (len(features) + 1) + "|"]
    for feature in features:
        cells = [cell(answers.get(frozenset((feature, beside)))) for beside in features]
        lines.append(f"| {called(feature)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(answer: str | None) -> str:
    """A word for an answer."""
    if answer is None:
        return NOT_ASKED
    return answer if answer in WORKS else "error"


def called(feature: str) -> str:
    """What the pages call a feature."""
    return NAMES.get(feature, feature)


def errors(every: list[Row]) -> str:
    """The errors, those of a feature alone first; pairs with the same message share a row."""
    merged: dict[tuple[str, str], list[str]] = {}
    for what, row in failing(every):
        merged.setdefault((row["answer"], row["message"]), []).append(what)
    lines = ["| together | error |", "|---|---|"]
    lines += [f"| {'; '.join(dict.fromkeys(what))} | {kind}: {shown(text)} |" for (kind, text), what in merged.items()]
    return "\n".join(lines)


def failing(every: list[Row]) -> Iterator[tuple[str, Row]]:
    """Each error with what it is raised for, without the pairs of a feature that its mode does not take at all."""
    alone = {
        (row["mode"], row["feature"]) for row in every if row["feature"] == row["beside"] and row["answer"] not in WORKS
    }
    for row in every:
        mode, feature, beside, answer = (row[key] for key in ("mode", "feature", "beside", "answer"))
        if answer in WORKS:
            continue
        if feature == beside:
            yield f"{called(feature)}, {mode} mode", row
        elif not {(mode, feature), (mode, beside)} & alone:
            yield f"{called(feature)} and {called(beside)}", row


def shown(text: str) -> str:
    """The beginning of a message, for a cell of a table."""
    return (text if len(text) <= 150 else text[:147] + "...").replace("|", "\\|")
