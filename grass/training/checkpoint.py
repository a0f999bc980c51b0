"""Checkpoints that are either complete or not there."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from grass.training.states import read_state, write_state
from grass.training.weights import load_weights, read_weights, write_weights

MANIFEST = "manifest.json"
TEMPORARY = ".incomplete-"


class CheckpointStore:
    """The checkpoints of one run: ``root/step-00000100/`` and so on.

    Each holds the model as ``from_pretrained`` loads it (int8 weights as codes, :mod:`grass.int8`); all else that a
    resume needs, the optimizer's state in shards (:mod:`grass.training.states`); and a manifest of file sizes, which
    tells a complete checkpoint from a damaged one.

    Args:
        root: directory of the checkpoints.
        keep: how many to keep; older ones are deleted.
    """

    def __init__(self, root: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Invalid {keep=}: must be >= 1")
        self.root = root
        self.keep = keep

    def save(
        self, step: int, model: PreTrainedModel, state: Mapping[str, Any], weights: dict[str, Tensor] | None = None
    ) -> Path:
        """Write the checkpoint of a step, then delete those beyond the newest ``keep`` and what was left unfinished.

        Args:
            step: after which it is made.
            model: whose configuration and weights it holds.
            state: everything else.
            weights: the model's, where it holds only shards of them itself.
        """
        path = self.root / f"step-{step:08d}"
        with atomic_directory(path) as partial:
            write_model(model, partial, weights)
            write_state(state, partial)
            sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
            (partial / MANIFEST).write_text(json.dumps(sizes))
        for old in sorted(self.root.glob("step-*"))[: -self.keep]:
            shutil.rmtree(old)
        for leftover in self.root.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover)
        return path

    def latest(self) -> Path | None:
        """The newest complete checkpoint, if there is one."""
        return next((path for path in sorted(self.root.glob("step-*"), reverse=True) if is_complete(path)), None)

    @staticmethod
    def load(path: Path, model: PreTrainedModel) -> dict[str, Any]:
        """Load the weights into ``model`` and return the rest of the state, on the CPU."""
        weights = read_weights(path)
        if isinstance(model, FSDPModule):
            set_model_state_dict(model, {**weights}, options=StateDictOptions(full_state_dict=True))
        else:
            load_weights(model, weights)
        return read_state(path)


def export_model(model: PreTrainedModel, path: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write a directory that ``from_pretrained`` loads, atomically; ``weights`` as in :meth:`CheckpointStore.save`."""
    with atomic_directory(path) as partial:
        write_model(model, partial, weights)


def write_model(model: PreTrainedModel, path: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write configuration and weights to an existing directory."""
    model.config.save_pretrained(path)
    write_weights(model.state_dict() if weights is None else weights, path)


def is_complete(path: Path) -> bool:
    """Whether every file of the manifest is there and of the right size."""
    try:
        sizes = json.loads((path / MANIFEST).read_text())
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill; afterwards it is flushed to disk and takes its name ``path`` in one step.

    A process that dies before that leaves a directory with another name. What ``path`` was before is replaced.
    """
    partial = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    yield partial
    for file in partial.iterdir():
        _flush(file)
    _flush(partial)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
