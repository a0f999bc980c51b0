"""What a run trains with and what it holds: ``run.json`` beside its log, which reports show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer
from grass.memory import state_bytes
from grass.optimizer import GrassAdamW

FILE = "run.json"


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Method, rank and explored rows as shares of the first projected weight, and bytes held, in MB.

    Peers give their class and the rank in their groups. Gradients are counted as those of all parameters that train.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    layers = [layer for layer in model.modules() if isinstance(layer, CompactLayer)]
    ranks = [group["rank"] for group in optimizer.param_groups if group.get("rank") is not None]
    method: str = type(optimizer).__name__
    explore: Any = None
    rank = ranks[0] if ranks else None
    if layers:
        size, (selected, explored) = layers[0].shape[layers[0].dim], layers[0].counts()
        method, rank, explore = f"{method}, compact mode", round(selected / size, 4), round(explored / size, 4)
    elif ranks and isinstance(optimizer, GrassAdamW):
        method, explore = f"{method}, dense mode", next(g["explore"] for g in optimizer.param_groups if g["rank"])
        explore = "all others" if explore is None else explore
    held = state_bytes(optimizer)
    found = {
        "method": method,
        "rank": rank,
        "explored": explore,
        "lr": max(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups),
        "state MB": held.device / 1e6,
        "state on host MB": held.host / 1e6,
        "gradients MB": sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 1e6,
    }
    if torch.cuda.is_available():
        found["peak MB"] = torch.cuda.max_memory_allocated() / 1e6
    return {key: value for key, value in found.items() if value is not None}


def write_setup(out: Path, model: nn.Module, optimizer: Optimizer, **known: Any) -> None:
    """Write :func:`describe` into the directory of a run, with what only the caller knows."""
    (out / FILE).write_text(json.dumps({**describe(model, optimizer), **known}, indent=1) + "\n")


def read_setup(directory: Path) -> dict[str, Any]:
    """What :func:`write_setup` wrote; empty where there is none."""
    file = directory / FILE
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found
