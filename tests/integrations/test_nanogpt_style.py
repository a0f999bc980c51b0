"""The example of a plain loop runs, learns, and goes on from its checkpoint as if it had never stopped."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.runs import assert_same

EXAMPLE = Path(__file__).parents[2] / "examples/nanogpt_style.py"


def run(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, iters: int) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--iters", str(iters), "--checkpoint", str(checkpoint)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.slow
def test_learns_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    whole, stopped = tmp_path / "whole.pt", tmp_path / "stopped.pt"
    run(monkeypatch, whole, 7)
    report = capsys.readouterr().out
    assert float(report.split()[-1]) < 5.3, "less than a uniform guess's 5.5"
    run(monkeypatch, stopped, 4)
    run(monkeypatch, stopped, 7)
    assert capsys.readouterr().out.splitlines()[-1] == report.splitlines()[-1]
    assert_same(*(torch.load(path, weights_only=True) for path in (stopped, whole)))
