"""Static reports from the CSVs of runs: one plot per measure, one table, no network and no scripts."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grass.extras import optional
from training.run.setup import read_setup

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
else:
    pd = optional("pandas", "A report")

Runs = Mapping[str, pd.DataFrame]
"""Logs by the name of the run, indexed by ``step``."""

SKIPPED = frozenset({"tokens", "epoch", "total_flos"})
"""Columns that only count on."""
LOWER_IS_BETTER = ("loss", "perplexity")
NOISY = ("loss", "norm", "per_second")
"""A column of training is smoothed if its name contains one of these: it differs from batch to batch."""

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}img{width:100%}"
    ".table{overflow-x:auto}table{border-collapse:collapse}"
    "th,td{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #ddd}"
)


def read_run(path: Path) -> pd.DataFrame:
    """The log of a run: a CSV file, or the ``metrics.csv`` in a directory; ``attrs`` has what lies beside it.

    Raises:
        ValueError: there is none, or it has no column ``step`` or no row.
    """
    file = path / "metrics.csv" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"No log at {file}")
    try:
        log = pd.read_csv(file)
    except pd.errors.EmptyDataError:
        raise ValueError(f"{file} is empty: the run has logged nothing yet") from None
    except pd.errors.ParserError as error:
        raise ValueError(f"{file} is no CSV: {error}") from error
    if "step" not in log or log.empty:
        raise ValueError(f"{file} has no column 'step' or no row; columns: {', '.join(log.columns)}")
    log = log.set_index("step")
    log.attrs |= read_setup(file.parent)
    return log


def measures(runs: Runs) -> list[str]:
    """Columns worth a plot: of numbers, with two or more finite values in some run."""
    found: dict[str, None] = {}
    for log in runs.values():
        for name in log.select_dtypes("number"):
            if name not in SKIPPED and len(_values(log, str(name))) > 1:
                found.setdefault(str(name))
    return list(found)


def _values(log: pd.DataFrame, name: str) -> pd.Series:
    """The finite values of a column; none where the log lacks it."""
    if name not in log:
        return pd.Series(dtype=float)
    column = log[name]
    return column[column.map(math.isfinite)]


def summary(runs: Runs) -> pd.DataFrame:
    """A row per run: what it trained with and holds, the last step, and the last value of every other measure.

    Of measures evaluated more than once the best value is there, too.
    """
    rows: dict[str, dict[str, Any]] = {}
    for run, log in runs.items():
        rows[run] = {**log.attrs, "steps": log.index[-1]}
        for name in measures(runs):
            values = _values(log, name)
            if values.empty or name in log.attrs:  # such as the learning rate, which decays
                continue
            rows[run][name] = values.iloc[-1]
            if name.startswith("eval_") and any(key in name for key in LOWER_IS_BETTER):
                rows[run][f"best {name}"] = values.min()
    return pd.DataFrame.from_dict(rows, orient="index")


def plot(runs: Runs, smooth: float) -> Figure:
    """A plot of each measure against the step, all runs in each; evaluations are marked.

    Noisy measures of training are smoothed over ``smooth`` rows, and their titles say so. Runs that have fewer rows are
    drawn as they are.
    """
    names = measures(runs)
    if not names:
        raise ValueError(f"Nothing to plot: no column of {', '.join(runs)} has two numbers")
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure: Figure = optional("matplotlib.figure", "A report").Figure(
        figsize=(5 * columns, 3.2 * rows), layout="constrained"
    )
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for name, axis in zip(names, axes, strict=False):
        _draw(axis, runs, name, smooth)
    for axis in list(axes)[len(names) :]:
        axis.remove()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _draw(axis: Any, runs: Runs, name: str, smooth: float) -> None:
    evaluated = name.startswith("eval_")
    logged = {run: _values(log, name) for run, log in runs.items()}
    noisy = smooth > 1 and not evaluated and any(part in name for part in NOISY)
    smoothed = {run for run, values in logged.items() if noisy and len(values) >= smooth}
    for run, values in logged.items():
        shown = values.ewm(span=smooth).mean() if run in smoothed else values
        points = evaluated or len(values) == 1  # a line of one value is not seen
        axis.plot(shown.index, shown.to_numpy(), "o-" if points else "-", label=run, markersize=3)
    short = any(0 < len(values) < smooth for values in logged.values())
    note = f"\nsmoothed over {smooth:g} rows{', shorter runs as they are' if short else ''}" if smoothed else ""
    axis.set(xlabel="step", title=f"{name}{note}")
    axis.grid(alpha=0.3)


def write_png(runs: Runs, path: Path, smooth: float) -> None:
    """The plots as an image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(runs, smooth).savefig(path, dpi=120)


def write_html(runs: Runs, path: Path, smooth: float) -> None:
    """Plots and table as one page."""
    image = io.BytesIO()
    plot(runs, smooth).savefig(image, format="png", dpi=120)
    data = base64.b64encode(image.getvalue()).decode()
    title = html.escape(", ".join(runs))
    table = summary(runs).to_html(border=0, float_format=lambda value: f"{value:.4g}", na_rep="", escape=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1><h2>Where they ended</h2><div class=table>{table}</div><h2>How they got there</h2>"
        f'<img alt="One plot for each measure" src="data:image/png;base64,{data}"></html>\n'
    )
