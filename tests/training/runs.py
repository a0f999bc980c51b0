"""Runs of scripts/pretrain.py in processes of their own, fast enough to start many of them.

A fork server imports the libraries once; each run is a process forked from it, killed and signalled like any other.
"""

from __future__ import annotations

import csv
import itertools
import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

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
LIMIT = 1200
"""Seconds after which a run hangs: none takes as long on the slowest machine."""

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["training.run.loop", "training.run.optimizers", "transformers.models.llama"])


def start(out: Path, *flags: str, spoil: Callable[[], None] | None = None) -> ForkServerProcess:
    """Start a tiny run, in whose process ``spoil`` is called first."""
    process = context.Process(target=_pretrain, args=(["--out", str(out), *TINY, *flags], spoil))
    process.start()
    return process


def finish(process: ForkServerProcess) -> int:
    """Wait for a run to end: its exit code."""
    process.join(LIMIT)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def signal_itself(number: int, step: int) -> None:
    """Have the run send itself a signal when it begins the step after ``step``."""
    from training.run.loop import Trainer

    train_step = Trainer.train_step

    def signalled(trainer: Trainer) -> Any:
        if trainer.step == step:
            os.kill(os.getpid(), number)
        return train_step(trainer)

    Trainer.train_step = signalled


def die_saving(step: int, events: int) -> None:
    """Have the run kill itself in the first checkpoint from ``step`` on, after so many operations on its files."""
    from training.run.checkpoint import TEMPORARY
    from training.run.loop import Trainer

    save, left = Trainer.save, itertools.count(events, -1)

    def watch(event: str, arguments: tuple) -> None:
        if arguments and TEMPORARY in str(arguments[0]) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(trainer: Trainer) -> None:
        if trainer.step >= step:
            sys.addaudithook(watch)
        save(trainer)

    Trainer.save = dying


def die_stepping(step: int, values: int) -> None:
    """Have the run kill itself after ``step``, when so many parameters have come up from the host's next step."""
    from grass.machine.link import Link
    from training.run.loop import Trainer

    train_step, up, left = Trainer.train_step, Link.up, itertools.count(values, -1)
    begun = threading.Event()

    def beginning(trainer: Trainer) -> Any:
        if trainer.step == step:
            begun.set()
        return train_step(trainer)

    def dying(link: Link, *arguments: Any) -> None:
        if begun.is_set() and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        up(link, *arguments)

    Trainer.train_step, Link.up = beginning, dying


def logged_steps(out: Path) -> list[int]:
    """The steps in a run's ``metrics.csv``."""
    path = out / "metrics.csv"
    return [int(row["step"]) for row in csv.DictReader(path.open())] if path.exists() else []


def _pretrain(arguments: Sequence[str], spoil: Callable[[], None] | None) -> None:
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # not its multiprocessing lock, which a killed process leaves behind
    if spoil is not None:
        spoil()
    sys.argv = [str(PRETRAIN), *arguments]
    runpy.run_path(str(PRETRAIN), run_name="__main__")


def without_dropout(base: Path) -> Path:
    """A saved model, from now on without dropout: then batches may be divided in several ways."""
    file = base / "config.json"
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout")
    file.write_text(json.dumps({**json.loads(file.read_text()), **dict.fromkeys(names, 0.0)}))
    return base
