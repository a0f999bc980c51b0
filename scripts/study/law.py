"""Fit how the best learning rate of the projected weights goes with the share of the columns that move in a step.

    python scripts/study/law.py     # cells.csv -> law.csv and docs/images/quality_law.png

The best rate is where the parabola through the lowest loss and its two neighbours is lowest, against the logarithm of
the rate. It is *inside* if the lowest loss is neither that of the smallest rate tried nor that of the largest. Where
rates were tried in float32, under bf16 autocast and on a GPU, the one counts in which the best is inside, then that
with more seeds at the best, then that with more rates. Where other parameters had several rates, the one counts in
which the best is inside, then that with more seeds, then that which ended lowest. Of a width and a horizon at which
AdamW's best rate is inside, ``times = (n / (r + q)) ** exponent`` is fitted by least squares to the logarithms of all
that are inside; ``residual`` is what is left, in powers of two. ``losses`` are those of ``seeds`` at ``at``, the rate
that ended lowest with the first. What a seed has not in that precision, or a rate where the best is not inside, comes
from another: precisions move a loss as much as seeds do, and none ends lower (``docs/quality.md``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from results import CURVE
from run import DIRECTORY
from tables import read_cells

sys.path.append(str(Path(__file__).parents[1]))
from page_tables.law import OTHER_RATES, WIDTHS, is_of_the_law, linear_rate
from page_tables.source import settings_of

from grass.command_line import ArgumentParser

GPU = DIRECTORY.parent / "gpu" / "cells.csv"
SEED = 0
"""Rates were swept with it; other seeds ran at the best rate, and differ by more than neighbouring rates do."""
LEAST = 3
"""Rates of a curve; fewer say nothing about the best one."""
SEEDS = 3
"""Losses at the best rate; fewer are made up from other precisions."""
WIDTH_AND_HORIZON = ["hidden", "steps"]
COLUMNS = [*WIDTH_AND_HORIZON, "moving", "other", "tried", "best", "inside", "at", "seeds", "losses"]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="of cells.csv and law.csv")
    parser.add_argument("--gpu", type=Path, default=GPU, help="cells that a GPU ran")
    parser.add_argument(
        "--out", type=Path, default=DIRECTORY.parents[1] / "docs" / "images", help="where the plot goes"
    )
    args = parser.parse_args(argv)
    cells = [read_cells(args.directory / "cells.csv").assign(device=""), read_cells(args.gpu).assign(device=", GPU")]
    law = fit(best_rates(pd.concat(cells, ignore_index=True)))
    law.to_csv(args.directory / "law.csv", index=False, float_format="%.4g", lineterminator="\n")
    mpl.use("Agg")
    plot(law, args.out / "quality_law.png")


def best_rates(cells: pd.DataFrame) -> pd.DataFrame:
    """The best rate by width, horizon and the share of the columns that move; AdamW with two rates moves all."""
    rows = []
    for key, group in pd.DataFrame(_swept(cells)).groupby([*WIDTH_AND_HORIZON, "moving"]):
        if found := list(_at_best_other(group)):
            best = max(found, key=lambda each: (each.inside, len(each.losses), len(each.tried)))
            pooled = _by_other(group)[best.other]
            best = best if best.inside else _best_of(best.other, best.table.combine_first(pooled))
            rows.append((*key, *_as_text(best, pooled.loc[best.at])))
    return pd.DataFrame(rows, columns=COLUMNS)


def _at_best_other(group: pd.DataFrame) -> Iterator[_Best]:
    """What is best in each precision, at the best rate of other parameters."""
    for _, of in group.groupby("precision"):
        swept = {other: of for other, of in _by_other(of).items() if SEED in of and of[SEED].count() >= LEAST}
        found = [_best_of(other, table) for other, table in swept.items()]
        if found:
            yield max(found, key=lambda each: (each.inside, len(each.losses), -each.losses[SEED]))


def _by_other(cells: pd.DataFrame) -> dict[float, pd.DataFrame]:
    """Tables of losses by rate and seed, by the rate of other parameters."""
    return {float(other): of.pivot_table("loss", "rate", "seed") for other, of in cells.groupby("other")}


class _Best(NamedTuple):
    """What is best in a ``table`` of losses by rate and seed; ``losses`` are those at the rate ``at``, by seed."""

    other: float
    tried: pd.Index
    best: float
    inside: bool
    at: float
    losses: pd.Series
    table: pd.DataFrame


def _best_of(other: float, table: pd.DataFrame) -> _Best:
    curve = table[SEED].dropna()
    at = float(curve.idxmin())
    return _Best(other, curve.index, *lowest(curve), at, table.loc[at].dropna(), table)


def _as_text(best: _Best, pooled: pd.Series) -> tuple[Any, ...]:
    """The last ``COLUMNS``; ``pooled`` has the losses at ``best.at`` in all precisions, for seeds that lack one."""
    losses = best.losses if len(best.losses) >= SEEDS else best.losses.combine_first(pooled.dropna())
    tried, seeds = (" ".join(f"{value:.2g}" for value in values) for values in (best.tried, losses.index))
    written = " ".join(f"{loss:.4f}" for loss in losses)
    return best.other, tried, best.best, best.inside, best.at, seeds, written


def _swept(cells: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Pretraining cells that differ in nothing but width, horizon, share, rate, seed and precision."""
    fits = (cells["task"] == "pretrain") & (cells["optimizer"] == "grass")
    for row in cells[fits & cells["model"].isin(WIDTHS)].to_dict("records"):
        values = settings_of(row)
        whole, compact = values.get("rank") == "1.0", "compact" in values
        if values["lr"] in OTHER_RATES and is_of_the_law(values) and (whole or compact):
            rank = float(values.get("rank", 0.25))
            yield {
                "hidden": int(WIDTHS[row["model"]]),
                "steps": int(row["steps"]),
                "seed": int(row["seed"]),
                "precision": ("bf16" if "autocast" not in values else "float32") + row.get("device", ""),
                "moving": 1.0 if whole else rank + float(values.get("explore", rank)),
                "other": float(values["lr"]),
                "rate": linear_rate(values),
                "loss": row[CURVE[-1]],
            }


def lowest(curve: pd.Series) -> tuple[float, bool]:
    """The rate at which a curve of losses by rate is lowest, and whether it is inside of those tried."""
    place = int(np.argmin(curve.to_numpy()))
    if not 0 < place < len(curve) - 1:
        return float(curve.index[place]), False
    near = curve.iloc[place - 1 : place + 2]
    square, slope, _ = np.polyfit(np.log2(near.index.to_numpy(dtype=float)), near.to_numpy(), 2)
    return float(2 ** (-slope / (2 * square))), True


def fit(best: pd.DataFrame) -> pd.DataFrame:
    """Add ``times`` AdamW's best rate, the ``exponent`` of its width and horizon, and the ``residual``."""
    groups = [_fit_one(group) for _, group in best.groupby(WIDTH_AND_HORIZON)]
    return pd.concat(groups, ignore_index=True)


def _fit_one(group: pd.DataFrame) -> pd.DataFrame:
    adamw = group[(group["moving"] == 1) & group["inside"]]["best"]
    if adamw.empty:
        return group.assign(times=math.nan, exponent=math.nan, residual=math.nan)
    times = group["best"] / adamw.iloc[0]
    taken = group["inside"] & (group["moving"] < 1)
    more, log_times = -np.log2(group["moving"]), np.log2(times)
    exponent = (more * log_times)[taken].sum() / (more**2)[taken].sum() if taken.any() else math.nan
    return group.assign(times=times, exponent=exponent, residual=(log_times - exponent * more).where(taken))


def plot(law: pd.DataFrame, path: Path) -> None:
    """Best rates as multiples of AdamW's against the share that moves; open points are bounds."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for (hidden, steps), group in law[law["times"].notna()].groupby(WIDTH_AND_HORIZON):
        more, exponent = 1 / group["moving"], group["exponent"].iloc[0]
        (line,) = axes.plot(more, more**exponent, "-", alpha=0.5)
        for inside, fill in ((True, line.get_color()), (False, "none")):
            points = group["inside"] == inside
            label = f"hidden {hidden}, {steps:,} steps: exponent {exponent:.2f}" if inside else None
            axes.plot(more[points], group["times"][points], "o", color=line.get_color(), mfc=fill, label=label)
    axes.axline((1, 1), (2, 2), color="black", ls=":", label='scale="auto": exponent 1')
    axes.set(xscale="log", yscale="log", xlabel="n / (r + q)", ylabel="best rate of projected weights, times AdamW's")
    axes.set_xlim(left=0.9)
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
