import dataclasses
import signal
import subprocess
import sys

import pandas as pd
import pytest
import run as study
from grid import load_grid
from pretraining import pretrain
from results import Results

from tests.conftest import SCRIPTS


def command(tmp_path):
    names = {"--grid": "grid.yaml", "--locks": "locks"}  # results are beside the grid
    return [part for flag, name in names.items() for part in (flag, str(tmp_path / name))]


def rows(tmp_path):
    return pd.read_csv(tmp_path / "cells.csv", dtype=str)


@pytest.fixture
def trained(monkeypatch):
    """What was trained, in place of training it."""
    cells = []

    def record(cell, grid, base):
        cells.append(cell.key)
        assert len(cells) < 20, "cells run again and again"
        return {"loss_100": len(cells)}

    monkeypatch.setattr(study, "run_cell", record)
    return cells


def test_a_cell_trains_and_reports(grid_file):
    grid = load_grid(grid_file)
    adamw, grass = (pretrain(grid.cells[i], grid.data) for i in (1, 3))
    assert adamw["tokens"] == grass["tokens"] == 10 * 16
    assert grass["state_bytes"] < adamw["state_bytes"]
    for values in (adamw, grass):
        curve = [float(values[f"loss_{percent}"]) for percent in range(10, 101, 10)]
        assert 2 < curve[-1] < curve[0] < 6
    assert pretrain(grid.cells[3], grid.data) == grass


def test_gradients_far_below_eps_move_nothing(grid_file):
    grid = load_grid(grid_file)
    values = pretrain(dataclasses.replace(grid.cells[1], clip=1e-12), grid.data)
    assert float(values["loss_100"]) == pytest.approx(float(values["loss_10"]), abs=2e-3)


def test_finished_cells_are_skipped(tmp_path, grid_file, trained):
    grid = load_grid(grid_file)
    Results(tmp_path / "cells.csv").append(grid.cells[0], {})
    assert study.main(command(tmp_path)) == 0
    assert trained == [cell.key for cell in grid.cells[1:]]
    assert study.main(command(tmp_path)) == 0
    assert len(trained) == len(grid.cells) - 1


def test_what_is_added_meanwhile_is_run(tmp_path, grid_file, trained, monkeypatch):
    record = study.run_cell

    def add_a_seed(cell, grid, base):
        grid_file.write_text(grid_file.read_text().replace("seeds: [0, 1]", "seeds: [0, 1, 2]"))
        return record(cell, grid, base)

    monkeypatch.setattr(study, "run_cell", add_a_seed)
    assert study.main(command(tmp_path)) == 0
    assert trained == [cell.key for cell in load_grid(grid_file).cells]
    assert "2" in {seed for _, _, _, seed, *_ in trained}


def test_a_stopped_cell_leaves_no_row(tmp_path, grid_file, monkeypatch):
    monkeypatch.setattr(study, "run_cell", lambda cell, grid, base: None)
    assert study.main(command(tmp_path)) == 1
    assert not (tmp_path / "cells.csv").exists()


def test_a_begun_cell_is_left_to_its_process(tmp_path, grid_file):
    grid, results = load_grid(grid_file), Results(tmp_path / "cells.csv")
    (tmp_path / "locks").mkdir()
    locks = tmp_path / "locks"
    with study.next_cell(grid, results, locks) as first, study.next_cell(grid, results, locks) as second:
        assert (first, second) == (grid.cells[0], grid.cells[1])
    with study.next_cell(grid, results, locks) as again:
        assert again == first


@pytest.mark.slow
def test_killed_and_continued(tmp_path, grid_file, base):
    wanted = "methods: [adamw, grass], horizon: short, seeds: [0], vary: {lr: [0.001, 0.01]}"
    grid_file.write_text(grid_file.read_text().replace(wanted, f"task: classify, {wanted}"))
    whole = [*command(tmp_path), "--base", str(base)]
    died = subprocess.run([sys.executable, "-c", DYING, *whole], cwd=SCRIPTS / "study", check=False)
    assert died.returncode == -signal.SIGKILL
    killed = rows(tmp_path)
    assert len(killed) == 2
    assert study.main(whole) == 0
    finished = rows(tmp_path)
    assert len(finished) == 8
    assert finished["accuracy"].notna().tolist() == finished["task"].ne("pretrain").tolist()
    pd.testing.assert_frame_equal(finished.iloc[: len(killed)], killed)


DYING = """
import os, signal, sys
sys.path.insert(0, ".")
import run

train, begun = run.run_cell, []

def run_cell(cell, grid, base):
    begun.append(cell)
    if len(begun) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return train(cell, grid, base)

run.run_cell = run_cell
run.main(sys.argv[1:])
"""
"""Runs the grid, and dies in the third cell."""


def test_a_mistake_in_the_grid_ends_the_command(grid_file, capsys):
    grid_file.write_text("model: 1m")
    with pytest.raises(SystemExit):
        study.main(["--grid", str(grid_file)])
    assert "No data, horizons, methods, studies in the grid" in capsys.readouterr().err
