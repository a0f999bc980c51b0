"""The table of streamed training steps, from ``benchmarks/streaming.csv``."""

from __future__ import annotations

from page_tables.markdown import table
from page_tables.source import select

LINKS = {
    "fast": "the link takes 0.4 times as long as computing",
    "level": "the link takes 0.5 times as long: a unit is copied as fast as it computes in forward",
    "between": "the link takes 0.8 times as long",
    "slow": "the link takes 3 times as long",
}


def streaming() -> str:
    """Steps over three links, against the resident model and the link's own time."""
    header = ["", "step", "of the resident model's speed", "copies up", "of the link's time", "predicted step"]
    rows = []
    for regime, words in LINKS.items():
        rows.append([f"**{words}**", "", "", "", "", ""])
        for row in select("streaming.csv", f"regime={regime}"):
            copied = float(row["link_ms"]) > 0
            predicted = f"{float(row['predicted_ms']):.0f} ms" if row["predicted_ms"] else ""
            rows.append(
                [
                    row["contestant"],
                    f"{float(row['step_ms']):.0f} ms",
                    f"{float(row['of_resident']):.2f}",
                    f"{float(row['link_ms']):.0f} ms" if copied else "",
                    f"{float(row['of_link']):.2f}" if copied else "",
                    predicted,
                ]
            )
    return table(header, rows)
