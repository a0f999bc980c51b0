import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import run as study
from grid import load_grid
from pretraining import pretrain
from results import CURVE, Results

from grass.sweep.lock import Lock
from tests.conftest import SCRIPTS
from training.run.loop import Trainer


def options(tmp_path):
    names = {"grid": "grid.yaml", "results": "cells.csv", "base": "base"}
    return {name: str(tmp_path / file) for name, file in names.items()}


def command(tmp_path):
    names = {**options(tmp_path), "out": str(tmp_path / "out")}
    return [part for name, path in names.items() for part in (f"--{name}", path)]


def rows(tmp_path):
    return pd.read_csv(tmp_path / "cells.csv", dtype=str)


def in_float32(grid, number):
    """A cell of the grid. Without autocast, which takes long on a CPU without instructions for bfloat16."""
    return dataclasses.replace(grid.cells[number], autocast=False)


def test_a_cell_trains_and_reports(grid_file, tmp_path):
    grid = load_grid(grid_file)
    adamw, grass = (pretrain(in_float32(grid, i), grid.data, tmp_path / str(i)) for i in (1, 3))
    assert adamw["tokens"] == grass["tokens"] == 10 * 16
    assert grass["state_bytes"] < adamw["state_bytes"]
    for values in (adamw, grass):
        curve = [float(values[f"loss_{percent}"]) for percent in range(10, 101, 10)]
        assert 2 < curve[-1] < curve[0] < 6
    assert pretrain(in_float32(grid, 3), grid.data, tmp_path / "again") == grass
    assert not list(tmp_path.glob("*/checkpoints"))


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_cell_goes_on_where_it_was_interrupted(grid_file, tmp_path, monkeypatch, number):
    grid, evaluate = load_grid(grid_file), Trainer.evaluate

    def interrupted(self):
        if self.step == 7:
            raise KeyboardInterrupt
        return evaluate(self)

    cell = in_float32(grid, number)
    whole = pretrain(cell, grid.data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain(cell, grid.data, tmp_path / "parts")
    evaluated = []
    monkeypatch.setattr(Trainer, "evaluate", lambda self: (evaluated.append(self.step), evaluate(self))[1])
    assert pretrain(cell, grid.data, tmp_path / "parts") == whole
    assert evaluated == [7, 8, 9, 10]


@pytest.mark.slow
def test_weights_in_bfloat16(grid_file, tmp_path):
    grid = load_grid(grid_file)
    cell = in_float32(grid, 1)
    half = pretrain(dataclasses.replace(cell, bf16_weights=True), grid.data, tmp_path / "half")
    assert half["gradient_bytes"] == pretrain(cell, grid.data, tmp_path / "float32")["gradient_bytes"] // 2
    assert 2 < float(half["loss_100"]) < float(half["loss_10"]) < 6


def test_gradients_far_below_eps_move_nothing(grid_file, tmp_path):
    grid = load_grid(grid_file)
    values = pretrain(dataclasses.replace(in_float32(grid, 1), clip=1e-12), grid.data, tmp_path)
    assert float(values["loss_100"]) == pytest.approx(float(values["loss_10"]), abs=2e-3)


def test_cells_that_have_no_row_are_left(tmp_path, grid_file):
    grid, results = load_grid(grid_file), tmp_path / "cells.csv"
    assert study.cells_without_row(grid_file, results) == grid.cells
    Results(results).append(grid.cells[1], {})
    assert study.cells_without_row(grid_file, results) == [grid.cells[0], *grid.cells[2:]]
    named = [*grid.study("again").cells, *grid.study("final").cells]
    assert study.cells_without_row(grid_file, results, ["again", "final"]) == named
    assert study.cells_without_row(grid_file, results, ["again", "learning rate", "final"])[0] == named[0]
    several = study.cells_without_row(grid_file, results, ["again", "learning rate", "again"])
    assert len(several) == len({cell.key for cell in several}) == 3  # of five, one has a row and one is twice there
    Results(results).append(named[1], {})
    assert study.cells_without_row(grid_file, results, ["again", "final"]) == [named[0], named[2]]


def study_of(tmp_path):
    paths = {name: Path(path) for name, path in options(tmp_path).items()}
    (tmp_path / "out").mkdir(exist_ok=True)
    return study.Study(**paths, out=tmp_path / "out", names=None)


def test_a_cell_appends_its_row(tmp_path, grid_file, monkeypatch, capsys):
    values = {name: f"{1 / (1 + i):.4f}" for i, name in enumerate(CURVE)}
    asked = []

    def run_cell(cell, grid, *where):
        print("said by the cell")
        return asked.append((cell, *where)) or values

    monkeypatch.setattr(study, "run_cell", run_cell)
    cell, here = load_grid(grid_file).cells[3], study_of(tmp_path)
    assert study.train(cell, here)
    assert asked == [(cell, tmp_path / "base", here.path(cell), "cpu")]
    assert Results(tmp_path / "cells.csv").losses().keys() == {cell.key}
    assert here.path(cell, ".log").read_text() == "said by the cell\n"
    assert capsys.readouterr().out.startswith("0.1000  pretrain, ")


def test_a_stopped_cell_leaves_no_row(tmp_path, grid_file, monkeypatch):
    monkeypatch.setattr(study, "run_cell", lambda *_: None)
    cell, here = load_grid(grid_file).cells[0], study_of(tmp_path)
    with pytest.raises(SystemExit):
        study.train(cell, here)
    assert not (tmp_path / "cells.csv").exists()
    assert cell in here.left()


def test_a_cell_that_fails_is_told_and_left(tmp_path, grid_file, monkeypatch):
    monkeypatch.setattr(study, "run_cell", lambda *_: 1 // 0)
    cell, here = load_grid(grid_file).cells[0], study_of(tmp_path)
    assert not study.train(cell, here)
    assert "ZeroDivisionError" in here.path(cell, ".error").read_text()
    assert "Traceback" in here.path(cell, ".log").read_text()
    assert here.left() == load_grid(grid_file).cells[1:]


def test_processes_share_the_cells_and_read_the_grid_again(tmp_path, grid_file, monkeypatch):
    trained = []

    def run_cell(cell, *_):
        if not trained:  # while the first cell trains: another process has the second, and someone adds a study
            locks.append(Lock.take(here.path(cells[1], ".lock")))
            monkeypatch.setattr(study.time, "sleep", lambda _: Results(here.results).append(cells[1], {}))
            grid_file.write_text(grid_file.read_text() + ADDED)
        trained.append(cell)
        return dict.fromkeys(CURVE, "1.0")

    monkeypatch.setattr(study, "run_cell", run_cell)
    monkeypatch.setattr(study, "die_with_parent", lambda: None)
    here, cells, locks = study_of(tmp_path), load_grid(grid_file).cells, []
    with pytest.raises(SystemExit) as ended:
        study.work(here)
    assert ended.value.code == 0
    assert trained[:-1] == [cells[0], *cells[2:]]
    assert trained[-1].steps == 20
    assert here.left() == []


@pytest.mark.soak
def test_killed_and_continued(tmp_path, grid_file, base):
    (tmp_path / "base").symlink_to(base)
    whole = [sys.executable, str(SCRIPTS / "study" / "run.py"), *command(tmp_path), "--workers", "2"]
    with subprocess.Popen(whole) as process:
        while not (tmp_path / "cells.csv").exists() or len(rows(tmp_path)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    killed = rows(tmp_path)
    assert study.main([*command(tmp_path), "--workers", "2"]) == 0
    finished = rows(tmp_path)
    assert len(finished) == len(load_grid(grid_file).cells)
    assert finished["accuracy"].notna().tolist() == finished["task"].ne("pretrain").tolist()
    pd.testing.assert_frame_equal(finished.iloc[: len(killed)], killed)


@pytest.mark.soak
def test_a_cell_that_fails_is_told_and_tried_again(tmp_path, grid_file, capsys):
    (tmp_path / "base").mkdir()  # no model is in it
    grid_file.write_text(grid_file.read_text().partition("  - {name")[0] + ONLY)
    assert study.main(command(tmp_path)) == 1
    assert "classify" in capsys.readouterr().err
    assert study.main(command(tmp_path)) == 1


ADDED = "  - {name: later, methods: [adamw], horizon: long, seeds: [0]}\n"
ONLY = "  - {name: finetuning, task: classify, methods: [adamw], horizon: short, seeds: [0]}\n"


def test_an_unknown_study_ends_the_command(grid_file, capsys):
    with pytest.raises(SystemExit):
        study.main(["--grid", str(grid_file), "--study", "laws"])
    assert "Unknown study 'laws'; available: learning rate, final" in capsys.readouterr().err


def test_a_mistake_in_the_grid_ends_the_command(grid_file, capsys):
    grid_file.write_text("model: 1m")
    with pytest.raises(SystemExit):
        study.main(["--grid", str(grid_file)])
    assert "No data, horizons, methods, studies in the grid" in capsys.readouterr().err
