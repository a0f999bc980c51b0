"""scripts/report.py on small logs."""

import base64
import re
import runpy
from pathlib import Path

import pandas as pd
import pytest
import torch

import grass
from training.run.report import measures, plot, read_run, summary
from training.run.setup import write_setup

main = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "report.py"))["main"]


@pytest.fixture
def runs(tmp_path):
    """Two runs, the second without the last column of the first and with a name that HTML would swallow."""
    rows = {"step": [1, 2, 3, 4], "tokens": [8, 16, 24, 32], "loss": [4.0, 3.0, 2.0, 1.0]}
    rows |= {"eval_loss": [None, 2.5, None, 3.5], "note": ["a", "b", "c", "d"], "once": [1.0, None, None, None]}
    first, second = tmp_path / "first", tmp_path / "<second>"
    for path in (first, second):
        path.mkdir()
    pd.DataFrame({**rows, "grass_energy": [0.1, 0.2, 0.3, 0.4]}).to_csv(first / "metrics.csv", index=False)
    pd.DataFrame(rows).to_csv(second / "metrics.csv", index=False)
    return [first, second]


def logs(runs):
    return {path.name: read_run(path) for path in runs}


def test_measures_are_the_columns_worth_a_plot(runs):
    assert measures(logs(runs)) == ["loss", "eval_loss", "grass_energy"]


def test_summary_has_last_and_best(runs):
    table = summary(logs(runs))
    assert table.loc["first"].to_dict() == {
        "steps": 4,
        "loss": 1.0,
        "eval_loss": 3.5,
        "best eval_loss": 2.5,
        "grass_energy": 0.4,
    }
    assert pd.isna(table.loc["<second>", "grass_energy"])


def test_plots_show_every_run(runs):
    figure = plot(logs(runs), smooth=1)
    assert [axis.get_title() for axis in figure.axes] == ["loss", "eval_loss", "grass_energy"]
    lines = figure.axes[1].get_lines()
    assert [line.get_label() for line in lines] == ["first", "<second>"]
    assert lines[0].get_xydata().tolist() == [[2, 2.5], [4, 3.5]]
    smoothed = plot(logs(runs), smooth=3).axes[0].get_lines()[0].get_ydata()
    assert smoothed.tolist() == pd.Series([4.0, 3.0, 2.0, 1.0]).ewm(span=3).mean().tolist()


def test_only_noisy_measures_are_smoothed_and_say_so(tmp_path):
    rows = {"step": range(30), "loss": [i % 2 for i in range(30)], "lr": [i % 2 for i in range(30)]}
    rows |= {"grass_state_device_bytes": [i % 2 for i in range(30)]}
    pd.DataFrame(rows).to_csv(tmp_path / "long.csv", index=False)
    pd.DataFrame(rows).head(5).to_csv(tmp_path / "short.csv", index=False)
    runs = logs([tmp_path / "long.csv", tmp_path / "short.csv"])
    axes = {axis.get_title(): axis.get_lines() for axis in plot(runs, smooth=20).axes}
    title = "loss\nsmoothed over 20 rows, shorter runs as they are"
    assert list(axes) == [title, "lr", "grass_state_device_bytes"]
    assert axes[title][0].get_ydata().tolist() == runs["long.csv"]["loss"].ewm(span=20).mean().tolist()
    raw = [line for lines in axes.values() for line in lines if line is not axes[title][0]]
    assert all(set(line.get_ydata().tolist()) == {0, 1} for line in raw)
    (alone,) = (axis for axis in plot({"short": runs["short.csv"]}, smooth=20).axes if "loss" in axis.get_title())
    assert alone.get_title() == "loss", "nothing is smoothed"


def test_page_holds_all_it_shows(runs, tmp_path, capsys):
    main([*map(str, runs), "--out", str(tmp_path / "new" / "report.html")])
    assert capsys.readouterr().out.strip().endswith("report.html")
    page = (tmp_path / "new" / "report.html").read_text()
    image = base64.b64decode(re.search(r"base64,([^\"]+)", page)[1])
    assert image.startswith(b"\x89PNG")
    assert "&lt;second&gt;" in page
    assert "<second>" not in page
    assert "http" not in page
    assert ".table{overflow-x:auto}" in page, "a wide table scrolls in its own box"
    assert "<div class=table><table" in page


def test_image_of_one_csv(runs, tmp_path):
    main([str(runs[0] / "metrics.csv"), "--out", str(tmp_path / "report.png")])
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "No log at nowhere"),
        (["--out", "x.pdf"], "Invalid --out x.pdf: must end in .html or .png"),
        (["--smooth", "0"], "Invalid --smooth 0.0: must be >= 1"),
        (["empty.csv"], "is empty: the run has logged nothing yet"),
        (["header.csv"], "has no column 'step' or no row; columns: step, loss"),
        (["no-steps.csv"], "has no column 'step' or no row; columns: loss"),
        (["one-row.csv"], "Nothing to plot: no column of one-row.csv has two numbers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse(runs, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("no-steps.csv").write_text("loss\n1\n")
    Path("one-row.csv").write_text("step,loss\n1,2\n")
    Path("empty.csv").touch()
    Path("header.csv").write_text("step,loss\n")
    given = flags if not flags[0].startswith("--") else [str(runs[0]), *flags]
    with pytest.raises(SystemExit) as exit_:
        main(given)
    assert exit_.value.code == 2
    written = capsys.readouterr().err
    assert message in written
    assert written.count("\n") == 1, "no usage before it"


def test_infinite_values_make_no_empty_plot(tmp_path):
    rows = {
        "step": [1, 2, 3],
        "loss": [3.0, 2.0, 1.0],
        "grad_norm": [float("inf")] * 2 + [None],
        "odd": [1.0, None, 2.0],
    }
    pd.DataFrame(rows).to_csv(tmp_path / "metrics.csv", index=False)
    pd.DataFrame({"step": [2], "loss": [2.0]}).to_csv(tmp_path / "short.csv", index=False)
    found = {"long": read_run(tmp_path), "short": read_run(tmp_path / "short.csv")}
    figure = plot(found, smooth=1)
    assert [axis.get_title() for axis in figure.axes] == ["loss", "odd"]
    assert [line.get_marker() for line in figure.axes[0].get_lines()] == ["None", "o"]


@pytest.mark.parametrize("mode", ["dense", "compact", "adamw"])
def test_method_rank_and_memory_are_shown(tmp_path, mode):
    model = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
    if mode == "compact":
        grass.compact(model, rank=0.25, targets="all-linear")
        optimizer = grass.GrassAdamW(model, lr=2e-3)
    elif mode == "dense":
        optimizer = grass.GrassAdamW(grass.param_groups(model, rank=0.25, targets="all-linear"), lr=2e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    log = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "lr": [2e-3, 2e-4]})
    log.to_csv(tmp_path / "metrics.csv", index=False)
    write_setup(tmp_path, model, optimizer)
    table = summary({"run": read_run(tmp_path)})
    row = table.loc["run"]
    assert row["method"] == {"adamw": "AdamW"}.get(mode, f"GrassAdamW, {mode} mode")
    assert row["lr"] == 2e-3, "the run's, not that of the last step"
    assert row["state MB"] == grass.memory.state_bytes(optimizer).device / 1e6
    if mode != "adamw":
        assert row["rank"] == 0.25
        assert row["explored"] == {"compact": 0.25, "dense": "all others"}[mode]
    assert row["gradients MB"] == {"compact": 320e-6}.get(mode, 640e-6)
