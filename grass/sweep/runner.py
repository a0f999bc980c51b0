"""``grass.sweep.run``."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grass.sweep.board import Board
from grass.sweep.devices import check_host_memory, checked_devices
from grass.sweep.grid import Grid, Kind, Trial, check_trial, expanded
from grass.sweep.order import Seconds
from grass.sweep.pool import Sweep
from grass.sweep.progress import Bars
from grass.sweep.proposals import Proposals
from grass.sweep.stopping import StopRule
from grass.sweep.worker import GUARD

PERIOD = 0.05
"""Seconds from one look at the trials to the next."""


def run(
    trial: Trial,
    grid: Grid | Mapping[str, Any],
    *,
    out: str | Path,
    steps: int,
    devices: Sequence[str] | None = None,
    host: int | str | None = None,
    stop: StopRule | None = None,
    seconds: Seconds | None = None,
    sampler: Any = None,
    trials: int | None = None,
    retry: bool = False,
    progress: bool | None = None,
    tensorboard: bool = False,
) -> list[dict[str, Any]]:
    """Run a trial for all settings of a grid, each in a process of its own, one on each device at a time.

    Stop it at any time, also with SIGKILL: the same command goes on. Several commands may work on the same trials in
    the same folder; then each returns the table of all when all have ended. A trial whose process died is restarted
    once.

    Args:
        trial: a function at the top level of a module or script. It is called as ``trial(**settings, folder=folder,
            device=device)`` and yields pairs of step and loss. Steps are counted from 1 and increase; the trial is
            done when it has yielded ``steps`` and ends or yields more. ``folder`` is a directory of its own: a trial
            that keeps checkpoints there, and goes on from them, loses little when it is interrupted.
        grid: the values of each setting, for all combinations; or a list with the settings of each trial. Values are
            numbers, strings, bools or ``None``.
        out: the folder of journals, logs (what trials print) and the folders of trials. Trials with other settings,
            another ``trial`` or other ``steps`` may be there: they are left alone.
        steps: of a whole trial.
        devices: names such as ``["cuda:0", "cuda:1"]``, by default every accelerator, or the CPU. A CPU takes as many
            trials at a time as it has names: ``["cpu:0", "cpu:1"]``. A device that another command with the same
            ``out`` uses is waited for.
        host: host memory that a trial takes, in bytes or as ``"57GB"``; ``python -m grass.memory --stream`` says it for
            streamed models. Before anything starts it is checked that all devices' trials fit.
        stop: stops a trial early, as :class:`Behind` does. It sees the losses of the other trials at the same step, so
            what it stops depends on the order in which trials run. By default all trials run to their end.
        seconds: how long a whole trial takes, a function of its settings, in any unit. With several devices the longest
            trial starts first. By default the seconds a step of the trials that have run decide.
        sampler: an ``optuna.Study`` that proposes settings. ``grid`` then has a distribution for each, as
            ``optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)``, or a list of values. To resume such a
            sweep, give the study a storage that lasts.
        trials: how many trials the study shall have, with ``sampler``.
        retry: run trials again that ended in an error or out of memory.
        progress: one line for each trial, with tqdm; by default if tqdm is installed and stderr is a terminal.
        tensorboard: write the curves, and the table for the tab of hyperparameters, to ``out/tensorboard``.

    Returns:
        one record for each trial, in the order of the grid or of the study: the settings, ``end``, ``step`` and
        ``loss`` of the last yield, and ``message``, which tells an error. ``end`` is ``"done"``, ``"behind"``, ``"not
        finite"``, ``"out of memory"`` or ``"error"``. ``pandas.DataFrame`` takes it as it is.

    Raises:
        TypeError: ``trial`` cannot be pickled or lacks an argument; a setting of another type.
        ValueError: an empty grid, a trial twice, ``steps`` < 1, an unknown device; a trial that yields nothing, or
            anything but pairs with increasing steps, at the first yield at which it does.
        MemoryError: the trials of all devices take more than the free host memory.
        RuntimeError: a trial's process could not start.
        OSError: ``out`` cannot be written. What is written remains.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(f"A trial's process imports this script, which starts a sweep: {GUARD}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"Invalid steps={steps!r}: must be an integer >= 1")
    if stop is not None and not callable(stop):
        raise TypeError(f"Invalid stop={stop!r}: must be None or callable, as grass.sweep.Behind is")
    names = checked_devices(devices)
    proposals, settings = None, []
    if sampler is not None:
        proposals = Proposals(sampler, grid, trials)
        settings = proposals.known()
        check_trial(trial, [proposals.space])
    elif trials is not None:
        raise ValueError(f"Invalid trials={trials!r}: a grid has as many as it has; only sampler= needs it")
    else:
        settings = expanded(grid)
        check_trial(trial, settings)
    if host is not None:
        check_host_memory(host, len(names) if trials else min(len(names), len(settings)))
    if seconds is not None and not callable(seconds):
        raise TypeError(f"Invalid seconds={seconds!r}: must be None or a function of a trial's settings")
    bars, board = Bars.wanted(progress, steps), Board(Path(out) / "tensorboard") if tensorboard else None
    with Sweep(Kind(trial, steps, Path(out)), settings, names, stop, proposals, bars, board, seconds) as sweep:
        if retry:
            sweep.forget_failures()
        while not sweep.turn():
            time.sleep(PERIOD)
        return sweep.table()
