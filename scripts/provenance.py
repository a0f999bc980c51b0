"""Where measured numbers come from: every CSV of a benchmark says commit, versions and machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pandas as pd
import torch

from grass.machine.rates import processor


def commit() -> str:
    """``$GRASS_COMMIT``, or the repository's commit, with a plus sign if tracked files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty=+"]
    git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return os.environ.get("GRASS_COMMIT") or git.stdout.strip() or "unknown"


def write(result: pd.DataFrame, path: Path, *, digits: int = 5, **run: object) -> None:
    """Write a table with the options of the run, commit, versions and machine in every row."""
    machine = {"commit": commit(), "torch": torch.__version__, "cpu": processor(), "threads": torch.get_num_threads()}
    path.parent.mkdir(parents=True, exist_ok=True)
    result.assign(**run, **machine).to_csv(path, index=False, float_format=f"%.{digits}g")
    print(f"written to {path}")
