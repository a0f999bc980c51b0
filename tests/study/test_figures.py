import pandas as pd
import plot
import pytest
import tables
from grid import load_grid
from results import CURVE, Results

SPEED = pd.DataFrame(
    {"step_ms": [10.0, 8.0, 6.0, 7.0], "refresh_ms": [0.0, 9.0, 6.0, 5.0]},
    index=["adamw", "grass", "grass compact", "grass rows"],
).rename_axis("method")


@pytest.fixture
def directory(tmp_path, grid_file):
    results = Results(tmp_path / "cells.csv")
    for position, cell in enumerate(load_grid(grid_file).cells):
        results.append(cell, {"tokens": 160} | {name: 3 - position / 10 for name in CURVE})
    SPEED.to_csv(tmp_path / "speed.csv")
    return tmp_path


@pytest.mark.parametrize(
    ("method", "settings", "seconds"),
    [
        ("adamw", "lr=0.1", 0.010),
        ("grass", "lr=0.1 update_interval=3", 0.011),
        ("grass", "lr=0.1 compact=True update_interval=10", 0.0066),
        ("grass", "lr=0.1 update_interval=25", 0.00836),
        ("grass", "lr=0.1", 0.008045),  # the default interval of 200
        ("grass", "lr=0.1 rank=1.0 update_interval=1000 explore=0", 0.01),  # AdamW, its body at another rate
        ("grass", "lr=0.1 update_interval=25 explore=0", 0.0072),
    ],
)
def test_step_time_has_its_share_of_a_refresh(method, settings, seconds):
    assert tables.step_seconds(method, settings, SPEED) == pytest.approx(seconds)


def test_figures_are_drawn(directory):
    plot.main(["--directory", str(directory), "--out", str(directory)])
    assert (directory / "quality_lr.png").stat().st_size > 10_000
    assert (directory / "quality_curves.png").stat().st_size > 10_000


def test_every_study_has_its_table(directory, capsys):
    tables.main(["--grid", str(directory / "grid.yaml"), "--results", str(directory / "cells.csv")])
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if "#" in line] == [
        "### learning rate",
        "### final",
        "### finetuning",
        "### again",
    ]
    assert "| pretrain | 1m | 10 | adamw | lr=0.01 betas=0.8/0.9 | 2 | 2.5500 |" in printed
