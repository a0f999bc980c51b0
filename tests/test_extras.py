"""Optional packages: what needs one says so, by a name that can be installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import grass
from grass.extras import optional


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match=r"A plot needs no-such-package: pip install no-such-package \(No module"):
        optional("no_such_package.part", "A plot")


def test_a_history_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    optimizer = grass.GrassAdamW([model.weight], rank=2)
    history = grass.diagnostics.SelectionHistory(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    history.record()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="The table of a history needs pandas: pip install pandas"):
        history.table()


@pytest.mark.slow
def test_a_report_without_pandas() -> None:
    script = Path(__file__).parents[1] / "scripts" / "report.py"
    code = f"import sys, runpy; sys.modules['pandas'] = None; runpy.run_path({str(script)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "A report needs pandas: pip install pandas" in done.stderr
