"""Table of other people's trainers."""

from __future__ import annotations

from page_tables.markdown import label, number, table
from page_tables.source import read

NAMES = {
    "llamafactory": "LLaMA-Factory",
    "trl": "TRL, SFT",
    "lightning": "Lightning's Fabric",
    "unsloth": "unsloth, SFT",
}


def hosts() -> str:
    """Loss and bytes by AdamW and by Grass in each."""
    header = ["trainer", "optimizer", "loss", "state, MB", "gradients, MB", "of AdamW's bytes"]
    return table(
        header,
        (
            [
                f"{NAMES.get(row['host'], row['host'])} {row['version']}",
                label(row["optimizer"]),
                number(row["loss"], ".3f"),
                number(row["state_mb"], ".2f"),
                number(row["gradient_mb"], ".2f"),
                number(row["of_adamw"], ".2f"),
            ]
            for row in read("hosts.csv")
        ),
    )
