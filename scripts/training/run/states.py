"""The state of a run in files of bounded size, which ``torch.load(weights_only=True)`` takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.run.weights import SHARD_BYTES

STATE = "state.pt"
SHARD = "optimizer-{:05d}.pt"


def write_state(state: Mapping[str, Any], path: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a state to the directory ``path``: what the optimizer holds of each parameter in shards, the rest beside.

    A shard has at most ``shard_bytes`` of tensors, or one parameter's. They are saved as they are, strides included, so
    that a resumed step computes with the same layouts.
    """
    rest, optimizer = dict(state), dict(state.get("optimizer", {}))
    for number, shard in enumerate(_shards(optimizer.pop("state", {}), shard_bytes), start=1):
        torch.save(shard, path / SHARD.format(number))
    if "optimizer" in rest:
        rest["optimizer"] = optimizer
    torch.save(rest, path / STATE)


def read_state(path: Path) -> dict[str, Any]:
    """All that :func:`write_state` wrote, on the CPU."""
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    if "optimizer" in state:
        shards = sorted(path.glob(SHARD.replace("{:05d}", "*")))
        loaded = [torch.load(file, map_location="cpu", weights_only=True) for file in shards]
        state["optimizer"]["state"] = {key: held for shard in loaded for key, held in shard.items()}
    return state


def _shards(states: Mapping[Any, Mapping[str, Any]], shard_bytes: int) -> Iterator[dict[Any, Mapping[str, Any]]]:
    shard: dict[Any, Mapping[str, Any]] = {}
    size = 0
    for key, state in states.items():
        added = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        if shard and size + added > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[key] = state
        size += added
    if shard:
        yield shard
