"""``scripts/gpu_suite.sh`` is complete and runs: every benchmark, tiny, in the interpreter or on the stand-in."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.accelerator.standin import why_not

ROOT = Path(__file__).parents[2]
KERNELS = [
    "scatter_add_rows",
    "row_norms",
    "compact_adamw",
    "compact_adamw_8bit",
    "move_factors",
    "move_rows",
    "row_sketch",
    "shrink",
    "reload_rows",
]
WHOLE_STEPS = ["train_step", "capped_training", "offload", "offload_machine", "streaming"]
"""What else the suite measures."""
SUPPORT = ["__init__", "arithmetic", "dispatch", "language", "layout", "moment_codes", "random_bits", "together"]
"""Files beside the kernels: torch's arithmetic, dispatch, and what several kernels share."""


@pytest.mark.soak
def test_smoke(tmp_path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "GRASS"))}
    environment |= {"OUT": str(tmp_path), "PYTHON": sys.executable, "GRASS_COMMIT": "abc"}
    command = ["bash", str(ROOT / "scripts/gpu_suite.sh"), "--smoke"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert {path.stem for path in tmp_path.glob("*.csv")} == {*KERNELS, *WHOLE_STEPS}
    for path in tmp_path.glob("*.csv"):
        rows = pd.read_csv(path)
        assert rows[["gpu", "torch", "triton", "commit"]].notna().all(axis=None)
        assert (rows.commit == "abc").all()
        if path.stem in KERNELS:
            assert (rows.of_ceiling > 0).all()
    for name in ("offload", "streaming"):
        contest = pd.read_csv(tmp_path / f"{name}.csv", index_col="contestant")
        ours = contest.index.str.contains("rass")
        assert (contest.step_ms[ours] > 0).all()
        assert (contest.note[~ours] == "needs CUDA").all()
        assert why_not() is not None or (contest.peak_gib[ours] > 0).all()
    offload = pd.read_csv(tmp_path / "offload.csv", index_col="contestant")
    assert not offload.clipped["AdamW, torchao CPUOffloadOptimizer"]
    assert (pd.read_csv(tmp_path / "offload_machine.csv").host_rate > 0).all()
    capped = pd.read_csv(tmp_path / "capped_training.csv")
    assert (
        why_not() is not None or (capped.peak_bytes.between(0.95 * capped.planned_peak_bytes, capped.cap_bytes)).all()
    )


def test_says_at_once_what_python_lacks(tmp_path) -> None:
    """Before anything is copied or run; a Python without site-packages has none of it."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": str(bare)}
    command = ["bash", str(ROOT / "scripts/gpu_suite.sh"), "--smoke"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert (
        "lacks torch, triton, transformers, accelerate, pandas, scipy, pytest, hypothesis: pip install torch"
        in result.stderr
    )
    assert not list((tmp_path / "out").iterdir())


def test_every_kernel_has_its_benchmark() -> None:
    nouns = {path.stem for path in (ROOT / "triton_kernels").glob("*.py")}
    assert {*KERNELS, *SUPPORT} == nouns
    for noun in KERNELS:
        assert (ROOT / f"scripts/bench/kernels/{noun}.py").exists()
        assert (ROOT / f"tests/kernels/test_{noun}.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "gpu_train_step.py",
        *(
            pytest.param(script, marks=pytest.mark.soak)
            for script in ("kernels/row_norms.py", "gpu_offload.py", "gpu_streaming.py")
        ),
    ],
)
def test_says_that_there_is_no_gpu(script) -> None:
    command = [sys.executable, str(ROOT / "scripts/bench" / script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 1
    assert "needs a CUDA GPU, or --smoke" in result.stderr
