"""Tables of held-out losses in several precisions."""

from __future__ import annotations

from page_tables.markdown import table
from page_tables.source import read


def precision() -> str:
    """What rounding costs."""
    header = ["", "held-out loss", "unmoved", "state"]
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
    explored = f"rank {rows[0]['rank']}, as many explored" if "rank" in rows[0] else "rank 0.25, nothing explored"
    header = [f"frozen weights ({explored}, {rows[0]['steps']} steps)", *(f"seed {seed}" for seed in seeds)]
    return table(header, ([storage, *(losses[storage, seed] for seed in seeds)] for storage in storages))
