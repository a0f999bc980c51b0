"""The same trials under Ray Tune, for more than one machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grass.extras import optional
from grass.sweep.devices import checked_devices
from grass.sweep.grid import Trial, described
from grass.sweep.worker import NOTHING, Ended, guarded


def for_ray(trial: Trial) -> Callable[[dict[str, Any]], None]:
    """A trial of :func:`grass.sweep.run` as what ``ray.tune.Tuner`` takes.

    Each pair that the trial yields is reported as ``{"step": step, "loss": loss}``. Its ``device`` is the first one
    that Ray has assigned, or the CPU, and its ``folder`` lies in Ray's storage if that is a directory, so that a trial
    that Ray starts again goes on from its checkpoint; otherwise in Ray's folder of the trial, which the machine keeps.

    ::

        trainable = tune.with_resources(grass.sweep.for_ray(trial), {"gpu": 1})
        tune.Tuner(trainable, param_space={"lr": tune.grid_search([6e-3, 1.2e-2])}).fit()

    Args:
        trial: as for :func:`grass.sweep.run`. Its settings are the configuration that Ray proposes.

    Raises:
        ImportError: Ray is not installed.
        TypeError: ``trial`` is not callable.
    """
    if not callable(trial):
        raise TypeError(f"Invalid trial={trial!r}: must be a generator function, or another callable")
    optional("ray.tune", "grass.sweep.for_ray")

    @functools.wraps(trial, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    def trainable(config: dict[str, Any]) -> None:
        tune = optional("ray.tune", "grass.sweep.for_ray")
        folder = _folder(tune.get_context())
        folder.mkdir(parents=True, exist_ok=True)
        pairs = guarded(trial, {**config, "folder": folder, "device": checked_devices(None)[0]})
        try:
            step = 0
            for step, loss in pairs:
                tune.report({"step": step, "loss": loss})
            if not step:
                raise Ended({"misuse": NOTHING})
        except Ended as ended:
            if misuse := ended.record.get("misuse"):
                raise ValueError(f"The trial {described(trial)} cannot be run: {misuse}") from ended
            raise ended.__cause__ or ended from None

    del trainable.__wrapped__  # Ray reads the signature
    return trainable


def _folder(context: Any) -> Path:
    storage = context.get_storage()
    is_directory = getattr(storage.storage_filesystem, "type_name", "") == "local"
    return Path(storage.trial_fs_path if is_directory else context.get_trial_dir()) / "files"
