"""Stopping a finetuning run with a checkpoint, and going on from one with the same method and data."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.run.optimizers import OptimizerConfig
from training.run.processes import Processes
from training.run.signals import GracefulStop

if TYPE_CHECKING:
    from datasets import Dataset

FILE = "finetuning.json"
"""The file of each checkpoint with what :func:`described` says of its run."""
SAMPLE = 1000
"""At most so many examples are compared, spread over all."""


def described(dataset: Dataset, method: str, config: OptimizerConfig) -> dict[str, Any]:
    """What a run must have in common with the checkpoint that it goes on from."""
    crc = 0
    for number in range(0, len(dataset), len(dataset) // SAMPLE + 1):
        crc = zlib.crc32(json.dumps(dataset[number], sort_keys=True, default=str).encode(), crc)
    trains = f"{method}, {'compact' if config.compact else 'dense'} mode" if method == "grass" else method
    return {"method": trains, "examples": len(dataset), "crc32": crc, "shapes": _shapes(config)}


def _shapes(config: OptimizerConfig) -> dict[str, Any]:
    """Options of compact mode on which the shapes of model and state depend."""
    if not config.compact:
        return {}
    explore = config.rank if config.explore is None else config.explore
    return {"rank": config.rank, "explore": explore, "dim": config.grass_dim, "weights": config.weights}


def check(checkpoint: str | Path, run: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint with another method, another model in compact mode or other data.

    Raises:
        ValueError: the checkpoint says another method, other shapes or other encoded examples. What it does not say is
            taken to be the same.
    """
    file = Path(checkpoint) / FILE
    saved = run | (json.loads(file.read_text()) if file.is_file() else {})
    if saved["method"] != run["method"]:
        raise ValueError(f"{checkpoint} is of a run by {saved['method']}, this one is by {run['method']}")
    if saved["shapes"] != run["shapes"]:
        then, now = (", ".join(f"{name}={value}" for name, value in of["shapes"].items()) for of in (saved, run))
        raise ValueError(f"{checkpoint} is of a run with {then}, this one has {now}: another model in compact mode")
    if saved != run:
        raise ValueError(
            f"{checkpoint} is of a run on other data: {saved['examples']} examples then, {run['examples']} now, or the "
            "same number with other tokens. Its place in them means nothing here: begin anew from its model"
        )


class Checkpoints(TrainerCallback):
    """Says in each checkpoint what made it, and ends the training with one where a signal asks for it.

    Several processes agree after each step.

    Args:
        run: :func:`described`.
        stop: entered while the run trains.

    Attributes:
        stopped: whether a signal has ended the training, on whichever process it came.
    """

    def __init__(self, run: dict[str, Any], stop: GracefulStop) -> None:
        self.run, self.stop, self.stopped = run, stop, False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """End the training."""
        if Processes(args.process_index, args.world_size, args.device).any(self.stop.requested):
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Write into the checkpoint."""
        if state.is_world_process_zero:
            path = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / FILE
            path.write_text(json.dumps(self.run))
