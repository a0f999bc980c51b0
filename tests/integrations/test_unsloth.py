"""unsloth's full finetuning on a CPU. Skipped where unsloth is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.integrations.runs import assert_same

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""In float32 the two optimizers round differently."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("unsloth") is None, reason="unsloth is not installed")
def test_full_finetuning(tmp_path: Path) -> None:
    script = Path(__file__).with_name("unsloth_run.py")
    path = os.pathsep.join([str(Path(__file__).parents[2] / "scripts/bench"), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, value in runs["adamw"].items():
        assert not torch.equal(value, runs["before"][name])
        torch.testing.assert_close(runs["every column"][name], value, **TOLERANCE)
    assert_same(runs["resumed"], runs["grass"])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.allclose(runs["grass"][name], runs["adamw"][name], **TOLERANCE)
