import numpy as np
import pandas as pd
import plot
import pytest
import tables
from grid import load_grid
from matplotlib import pyplot as plt
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


def drawn(axes):
    """The lines of a plot: where they are, by the first word of their label."""
    return {line.get_label().split()[0]: line.get_xydata() for line in axes.lines}


@pytest.mark.slow
def test_figures_are_drawn(directory):
    """Sweeps of two methods over two rates; the mean of two seeds against tokens and against time."""
    plt.close("all")
    plot.main(["--directory", str(directory), "--out", str(directory)])
    sweeps, curves = (plt.figure(number) for number in plt.get_fignums())
    for name, figure in (("quality_lr", sweeps), ("quality_curves", curves)):
        pixels = plt.imread(directory / f"{name}.png")
        assert pixels.shape[:2] == tuple((150 * figure.get_size_inches()[::-1]).astype(int))
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10
    (axes,) = sweeps.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate", "held-out loss, nats per byte")
    assert axes.get_legend() is not None
    lines = drawn(axes)
    assert lines.keys() == {"adamw", "grass"}
    np.testing.assert_allclose(lines["adamw"], [[0.001, 3.0], [0.01, 2.9]])
    np.testing.assert_allclose(lines["grass"], [[0.001, 2.8], [0.01, 2.7]])
    by_tokens, by_time = curves.axes
    assert (by_tokens.get_xlabel(), by_time.get_xlabel()) == ("million tokens", "seconds of measured step time")
    assert [line.get_label() for line in by_tokens.lines] == ["adamw (2.550, 2 seeds)"]
    done = np.arange(1, len(CURVE) + 1) / len(CURVE)
    for axes, whole in ((by_tokens, 160 / 1e6), (by_time, 10 * 0.010)):
        np.testing.assert_allclose(drawn(axes)["adamw"], np.stack([done * whole, np.full_like(done, 2.55)], 1))
    plt.close("all")


def test_the_widest_model_has_the_best_run_of_each_timed_method():
    runs = [
        ("28m-wide", "270", "rank=1.0 scale=0.5", 1.7),
        ("28m-wide", "270", "rank=1.0 scale=0.25", 1.6),
        ("28m-wide", "270", "rank=0.0625 compact=True", 1.5),
        ("28m-wide", "270", "rank=0.25 compact=True", 1.4),
        ("1m", "270", "rank=0.0625 compact=True", 1.3),
        ("28m-wide", "540", "rank=0.0625 compact=True", 1.1),
        ("28m-wide", "270", "lr=0.1", 1.2),
    ]
    cells = pd.DataFrame(runs, columns=["model", "steps", "settings", CURVE[-1]])
    cells["optimizer"] = ["grass"] * 6 + ["galore"]
    speed = pd.DataFrame({"step_ms": [2.0, 1.0]}, index=["adamw", "grass compact"])
    assert set(plot.best_of_the_widest(cells, speed)[CURVE[-1]]) == {1.5, 1.6}
    second = cells.assign(**{CURVE[-1]: cells[CURVE[-1]] + 0.01})
    assert len(plot.best_of_the_widest(pd.concat([cells, second]), speed)) == 4


@pytest.mark.slow
def test_the_frontier_has_each_method_at_its_best_rate(tmp_path):
    """The mean of the seeds at the rate that is best with the first, against memory, and no other run."""
    settings = "rank=0.125 scale={} explore=0.125 compact=True"
    runs = [
        ("2150", "0", "adamw", "lr=0.001", 1.5),
        ("2150", "0", "adamw", "lr=0.002", 1.6),
        ("2150", "1", "adamw", "lr=0.001", 1.7),
        ("2150", "0", "grass", f"lr=0.003 {settings.format(0.5)}", 1.4),
        ("2150", "0", "grass", f"lr=0.012 {settings.format(0.5)}", 1.3),
        ("540", "0", "grass", f"lr=0.012 {settings.format(1.0)}", 1.2),
        ("2150", "0", "prodigy", "lr=0.003", 1.1),
        ("270", "0", "adamw", "lr=0.001", 1.8),
        ("270", "0", "adamw", "lr=0.002 autocast=False", 1.7),
        ("270", "0", "fira", "lr=0.003", 1.9),
    ]
    cells = pd.DataFrame(runs, columns=["steps", "seed", "optimizer", "settings", CURVE[-1]]).assign(model="28m-wide")
    cells = cells.assign(state_bytes=2_000_000, gradient_bytes=1_000_000)
    tracked = pd.DataFrame([("pretrain", "AdamW", 700.0), ("facts", "Grass compact, r = q = 1/8 n", 9.0)])
    tracked = tracked.set_axis(["task", "method", "peak_mb"], axis=1)
    plot.plot_frontier({"270": cells, "2150": cells}, tracked, tmp_path / "frontier.png")
    assert plt.imread(tmp_path / "frontier.png").size
    panels = [{bar.get_label(): bar[0].get_xydata()[0].tolist() for bar in a.containers} for a in plt.gcf().axes]
    short, tracked_short, held, whole = panels
    assert short == {"AdamW": [3.0, pytest.approx(1.8)], "Fira": [3.0, 1.9]}, "float32 is another comparison"
    assert tracked_short == {"AdamW": [700.0, pytest.approx(1.8)]}
    assert held == {"AdamW": [3.0, pytest.approx(1.6)], "Grass, n/8": [3.0, 1.3]}
    assert whole == {"AdamW": [700.0, pytest.approx(1.6)]}, "where it was tracked"
    plt.close("all")


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
