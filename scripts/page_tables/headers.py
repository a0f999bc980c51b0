"""The table of the text on which no default was tuned: `headers/cells.csv`."""

from __future__ import annotations

from page_tables.law import is_of_the_law, linear_rate, mean_and_each
from page_tables.markdown import table
from page_tables.source import Row, read, settings_of

FILE = "headers/cells.csv"
RANKS = {"0.25": "r = q = n/4", "0.125": "n/8", "0.0625": "n/16"}
DENSE = "dense mode, r = n/4"
NAMES = ["AdamW", *RANKS.values(), DENSE]


def headers() -> str:
    """Losses by seed at rates as a user gives them, which ``scale="auto"`` multiplies in compact mode."""
    losses: dict[tuple[int, float, float], dict[str, list[float]]] = {}
    for row in sorted(read(FILE), key=lambda row: row["seed"]):
        rate, other = given_rates(row)
        of = losses.setdefault((int(row["steps"]), -(other or 0), rate), {})
        of.setdefault(name(row), []).append(float(row["loss_100"]))
    lines = (
        [
            f"{steps:,}",
            f"{rate:g}",
            f"{-other:g}" if other else "the same",
            *(mean_and_each(of.get(n, [])) for n in NAMES),
        ]
        for (steps, other, rate), of in sorted(losses.items())
    )
    return table(["steps", "linear layers", "other parameters", *NAMES], lines)


def given_rates(row: Row) -> tuple[float, float | None]:
    """Rates of linear layers and of the others, or one of all parameters, before ``scale="auto"`` multiplies them."""
    values = settings_of(row)
    if "scale" not in values:
        return float(values["lr"]), None
    auto = {key: value for key, value in values.items() if key != "scale"}
    return float(values["lr"]) * linear_rate(values) / linear_rate(auto), float(values["lr"])


def name(row: Row) -> str:
    """The column of the table that a cell is in.

    Raises:
        ValueError: a cell differs in more than its rate and its columns.
    """
    values = settings_of(row)
    if row["optimizer"] == "adamw" or values.get("rank") == "1.0":
        return "AdamW"
    if row["optimizer"] == "grass" and values.keys() <= {"lr", "autocast"}:
        return DENSE
    if row["optimizer"] != "grass" or not is_of_the_law(values):
        raise ValueError(f"{FILE} has a cell of {row['settings']!r}, which its table does not show")
    return RANKS[values.get("rank", "0.25")]
