"""The notebooks run top to bottom, and were committed as they ran."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

PATHS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=1200, startup_timeout=1200, resources=place).execute()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_are_committed(path):
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in cells(notebook)] == list(range(1, len(cells(notebook)) + 1))
    outputs = [output for cell in cells(notebook) for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)


def test_there_are_notebooks():
    assert [path.stem for path in PATHS] == ["finetuning", "quickstart", "selection"]
