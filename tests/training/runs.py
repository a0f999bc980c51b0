"""Runs of scripts/pretrain.py in processes of their own, fast enough to start many of them.

A fork server imports the libraries once; each run is a process forked from it, killed and signalled like any other.
"""

from __future__ import annotations

import csv
import multiprocessing
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

PRETRAIN = Path(__file__).parents[2] / "scripts" / "pretrain.py"
TINY = (
    "--model",
    "1m",
    "--batch-size",
    "2",
    "--seq-len",
    "16",
    "--eval-blocks",
    "2",
    "--warmup",
    "2",
    "--log-every",
    "1",
)
START_TIMEOUT = 120

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["grass.training.run.loop", "grass.training.run.optimizers", "transformers.models.llama"]
)


def start(out: Path, *flags: str) -> ForkServerProcess:
    """Start a tiny run."""
    process = context.Process(target=_pretrain, args=(["--out", str(out), *TINY, *flags],))
    process.start()
    return process


def finish(process: ForkServerProcess) -> int:
    """Wait for a run to end: its exit code."""
    process.join(START_TIMEOUT)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def wait_until(process: ForkServerProcess, condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds; fail if the run ends before that."""
    while not condition():
        process.join(0.0005)
        assert process.is_alive(), "the run ended too early"


def logged_steps(out: Path) -> list[int]:
    """The steps in a run's ``metrics.csv``."""
    path = out / "metrics.csv"
    return [int(row["step"]) for row in csv.DictReader(path.open())] if path.exists() else []


def _pretrain(arguments: Sequence[str]) -> None:
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # not its multiprocessing lock, which a killed process leaves behind
    sys.argv = [str(PRETRAIN), *arguments]
    runpy.run_path(str(PRETRAIN), run_name="__main__")
