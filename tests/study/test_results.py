import multiprocessing

import pytest
from grid import load_grid
from results import COLUMNS, CURVE, Results
from tables import markdown, read_cells, seed_means, study_rows


@pytest.fixture
def grid(grid_file):
    return load_grid(grid_file)


def values(loss):
    return {"tokens": 160, "state_bytes": 8, "host_bytes": 4, "gradient_bytes": 2} | dict.fromkeys(CURVE, loss)


def test_rows_come_back(tmp_path, grid):
    results = Results(tmp_path / "new" / "cells.csv")
    assert results.losses() == {}
    for cell in grid.cells[:2]:
        results.append(cell, values(1.5))
    assert results.losses().keys() == {cell.key for cell in grid.cells[:2]}
    assert results.path.read_text().splitlines()[0] == ",".join(COLUMNS)


@pytest.mark.parametrize("kept", [1, 0])
def test_half_a_row_does_not_count_and_is_replaced(tmp_path, grid, kept):
    results = Results(tmp_path / "cells.csv")
    for cell in grid.cells[: kept + 1]:
        results.append(cell, values(1.5))
    whole = results.path.read_bytes()
    results.path.write_bytes(whole[:-3])
    assert results.losses().keys() == {cell.key for cell in grid.cells[:kept]}
    results.append(grid.cells[kept], values(1.5))
    assert results.path.read_bytes() == whole


def test_a_file_with_other_columns_is_refused(tmp_path, grid):
    results = Results(tmp_path / "cells.csv")
    results.path.write_text("model,steps\n1m,10\n")
    for call in (results.losses, lambda: results.append(grid.cells[0], values(1.5))):
        with pytest.raises(ValueError, match="has the columns model,steps, not task,model,steps"):
            call()
    assert results.path.read_text() == "model,steps\n1m,10\n"


def append_all(path, cells):
    for cell in cells:
        Results(path).append(cell, values(1.5))


def test_processes_append_side_by_side(tmp_path, grid):
    path = tmp_path / "cells.csv"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=append_all, args=(path, grid.cells[i::3] * 20)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 20 * len(grid.cells)
    assert {line.count(",") for line in lines} == {len(COLUMNS) - 1}
    assert Results(path).losses().keys() == {cell.key for cell in grid.cells}


def test_table_of_a_study(tmp_path, grid):
    results = Results(tmp_path / "cells.csv")
    for cell, loss in zip(grid.studies[1].cells, (1.5, 1.7), strict=True):
        results.append(cell, values(loss))
    results.append(grid.cells[0], values(9.0))
    table = seed_means(study_rows(grid.studies[1], read_cells(results.path)))
    assert markdown(table).splitlines()[2:] == [
        "| pretrain | 1m | 10 | adamw | lr=0.01 betas=0.8/0.9 | 2 | 1.6000 | 0.1414 | 160 | 8 | 4 |"
    ]


def test_accuracy_is_shown_where_there_is_one(tmp_path, grid):
    results = Results(tmp_path / "cells.csv")
    classify, instruct = grid.study("finetuning").cells
    results.append(classify, values(1.5) | {"accuracy": "0.2500"})
    results.append(instruct, values("nan"))
    results.append(grid.cells[0], values(1.5))
    rows = read_cells(results.path)
    header, _, *lines = markdown(seed_means(study_rows(grid.study("finetuning"), rows))).splitlines()
    assert "| seeds | loss | deviation | accuracy | tokens |" in header
    assert lines[0].startswith("| classify | 1m | 10 | adamw | lr=0.001 | 1 | 1.5000 |  | 0.2500 | 160 |")
    assert lines[1].startswith(
        "| instruct | 1m | 10 | grass | lr=0.001 rank=0.125 update_interval=3 | 1 |  |  |  | 160 |"
    )
    assert "accuracy" not in markdown(seed_means(study_rows(grid.study("learning rate"), rows)))
