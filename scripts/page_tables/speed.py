"""Tables of times."""

from __future__ import annotations

from page_tables.markdown import label, number, table
from page_tables.source import read


def train_step() -> str:
    """Whole training steps."""
    header = ["", "tokens/s", "times AdamW", "of the floor", "gradients", "state"]
    return table(
        header,
        (
            [
                label(row["optimizer"]),
                number(row["tokens_per_s"], ",.0f"),
                number(row["times_adamw"], ".2f"),
                number(row["of_floor"], ".2f"),
                f"{number(row['gradient_mb'], ',.1f')} MB",
                f"{number(row['state_mb'], ',.1f')} MB",
            ]
            for row in read("train_step.csv")
        ),
    )


def optimizer_step() -> str:
    """``step()`` over the weights of one model."""
    header = ["", "ms", "refresh, ms", "times AdamW", "over its floor", "state"]
    return table(
        header,
        (
            [
                label(row["optimizer"]),
                number(row["step_ms"], ".1f"),
                number(row["refresh_ms"], ",.0f") if float(row["refresh_ms"]) else "",
                number(row["times_faster_than_adamw"], ".2f"),
                number(row["step_over_floor"], ".1f"),
                f"{number(row['state_mb'], ',.0f')} MB",
            ]
            for row in read("optimizer_step.csv")
            if row["model"] == "350m"
        ),
    )


def small_weights() -> str:
    """``step()`` per weight for many small ones."""
    header = ["", "microseconds per weight", "outside the kernel"]
    return table(
        header,
        (
            [label(row["optimizer"]), number(row["us"], ".1f"), number(row["python_us"], ".1f")]
            for row in read("small_weights.csv")
        ),
    )


def study_speed() -> str:
    """Step times of the study's model."""
    header = ["", "step, ms", "a refresh adds, ms"]
    return table(
        header,
        (
            [label(row["method"]), number(row["step_ms"], ".1f"), number(row["refresh_ms"], ".1f")]
            for row in read("speed.csv")
        ),
    )
