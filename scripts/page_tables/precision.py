"""Tables of held-out losses in several precisions."""

from __future__ import annotations

from page_tables.markdown import table
from page_tables.source import Row, read


def precision() -> str:
    """What rounding costs."""
    header = [explored(read("precision.csv")[0]), "held-out loss", "unmoved", "state"]
    return table(
        header,
        (
            [
                row["precision"],
                f"{float(row['loss']):.3f}",
                f"{float(row['unmoved']):.2%}",
                f"{float(row['state_mb']):.2f} MB",
            ]
            for row in read("precision.csv")
        ),
    )


def int8_quality() -> str:
    """Loss by storage of the frozen weights and seed."""
    rows = read("int8_quality.csv")
    seeds, storages = (list(dict.fromkeys(row[name] for row in rows)) for name in ("seed", "weights"))
    losses = {(row["weights"], row["seed"]): f"{float(row['eval_loss']):.3f}" for row in rows if row["dim"] == "1"}
    options = f"rank {float(rows[0]['rank']):g}, {explored(rows[0])}, {rows[0]['steps']} steps"
    header = [f"frozen weights ({options})", *(f"seed {seed}" for seed in seeds)]
    return table(header, ([storage, *(losses[storage, seed] for seed in seeds)] for storage in storages))


def explored(row: Row) -> str:
    """What a run explored: the scripts explore as many columns as have state; rows that differ have a column for it."""
    return f"explore={row['explore']}" if "explore" in row else "as many columns explored"
