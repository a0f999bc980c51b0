"""Checkpoints that are either complete or not there."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from training.run.states import read_state, write_state
from training.run.weights import load_weights, read_weights, write_weights

logger = logging.getLogger("grass")

MANIFEST = "manifest.json"
TEMPORARY = ".incomplete-"
CHUNK = 2**24
"""Bytes that a checksum reads at a time."""


class CheckpointStore:
    """The checkpoints of one run: ``root/step-00000100/`` and so on.

    Each holds the model as ``from_pretrained`` loads it (int8 weights as codes, :mod:`grass.compact_mode.int8`); all
    else that a resume needs, the optimizer's state in shards (:mod:`training.run.states`); and a manifest of file
    sizes and checksums, which tells a complete checkpoint from a damaged one.

    Args:
        root: directory of the checkpoints.
        keep: how many complete ones to keep; what is older is deleted.
    """

    def __init__(self, root: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Invalid {keep=}: must be >= 1")
        self.root = root
        self.keep = keep
        self._damaged: set[Path] = set()

    def save(
        self, step: int, model: PreTrainedModel, state: Mapping[str, Any], weights: dict[str, Tensor] | None = None
    ) -> Path:
        """Delete what was left unfinished, write the checkpoint of a step, then delete old ones.

        If writing fails, for example because the disk is full, nothing of it stays and the old ones are as they were.

        Args:
            step: after which it is made.
            model: whose configuration and weights it holds.
            state: everything else.
            weights: the model's, where it holds only shards of them itself.
        """
        for leftover in self.root.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover)
        path = self.root / f"step-{step:08d}"
        with atomic_directory(path) as partial:
            write_model(model, partial, weights)
            write_state(state, partial)
            files = {f.name: {"bytes": f.stat().st_size, "crc32": checksum(f)} for f in partial.iterdir()}
            (partial / MANIFEST).write_text(json.dumps(files))
        self._damaged.discard(path)
        self._delete_old(path)
        return path

    def paths(self) -> list[Path]:
        """All checkpoints, by step, damaged ones too."""
        return sorted(self.root.glob("step-*"))

    def latest(self) -> Path | None:
        """The newest complete checkpoint; a warning names each damaged file that it passes over.

        ``None`` where there is no checkpoint. Reads all of the checkpoint, for its checksums.

        Raises:
            ValueError: there are checkpoints, but every one is damaged.
        """
        found = []
        for path in reversed(self.paths()):
            problem = damage(path)
            if problem is None:
                return path
            self._damaged.add(path)
            found.append(f"{path.name} ({problem})")
            logger.warning("The checkpoint %s is damaged: %s", path, problem)
        if found:
            raise ValueError(
                f"Every checkpoint in {self.root} is damaged: {', '.join(found)}. To start at step 0, delete them"
            )
        return None

    def _delete_old(self, saved: Path) -> None:
        """Delete what is older than the newest ``keep`` complete checkpoints, the one just ``saved`` never."""
        complete = [path for path in self.paths() if path not in self._damaged and damage(path, contents=False) is None]
        for old in self.paths():
            if len(complete) >= self.keep and old < complete[-self.keep] and old != saved:
                shutil.rmtree(old)

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


def damage(path: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint, with the file's name; ``None`` if it is complete.

    Without ``contents`` only the files' sizes are compared with the manifest, not their checksums.
    """
    try:
        for name, expected in json.loads((path / MANIFEST).read_text()).items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if (size := (path / name).stat().st_size) != expected["bytes"]:
                return f"{name} has {size:,} bytes, not {expected['bytes']:,}"
            if contents and checksum(path / name) != expected["crc32"]:
                return f"{name} has another checksum than when it was written"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    return None


def checksum(file: Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill; afterwards it is flushed to disk and takes its name ``path`` in one step.

    An exception deletes it; a process that dies leaves a directory with another name. What ``path`` was before is
    replaced.
    """
    partial = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            _flush(file)
        _flush(partial)
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise
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
