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

import torch
from transformers import PreTrainedModel

from grass.training.weights import load_weights, read_weights, write_weights

MANIFEST = "manifest.json"
STATE = "state.pt"
TEMPORARY = ".incomplete-"


class CheckpointStore:
    """The checkpoints of one run: ``root/step-00000100/`` and so on.

    Each holds the model as ``from_pretrained`` loads it; everything else that a
    resume needs in ``state.pt``; and a manifest of file sizes, which tells a complete checkpoint from a damaged one.

    Args:
        root: directory of the checkpoints.
        keep: how many to keep; older ones are deleted.
    """

    def __init__(self, root: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Invalid {keep=}: must be >= 1")
        self.root = root
        self.keep = keep

    def save(self, step: int, model: PreTrainedModel, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step, then delete those beyond the newest ``keep`` and what was left unfinished."""
        path = self.root / f"step-{step:08d}"
        with atomic_directory(path) as partial:
            write_model(model, partial)
            torch.save(dict(state), partial / STATE)
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
        load_weights(model, read_weights(path))
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
        return state


def export_model(model: PreTrainedModel, path: Path) -> None:
    """Write a directory that ``from_pretrained`` loads, atomically."""
    with atomic_directory(path) as partial:
        write_model(model, partial)


def write_model(model: PreTrainedModel, path: Path) -> None:
    """Write configuration and weights to an existing directory."""
    model.config.save_pretrained(path)
    write_weights(model.state_dict(), path)


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
