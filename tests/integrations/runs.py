"""Small Trainer runs: models, data and arguments, and what it means that two runs are one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from grass.integrations.transformers import GrassTrainer  # noqa: E402

MODES: dict[str, dict[str, Any]] = {
    "dense": {"mode": "dense", "rank": 4, "dim": 1, "update_interval": 2, "state_policy": "keep"},
    "compact": {"rank": 4, "update_interval": 2, "selection": "multinomial_norm", "state_policy": "bank"},
}

Build = Callable[..., torch.nn.Module]


def examples(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sequences of 12 tokens below 64, each token its predecessor plus the example's own stride."""
    rows = [(start * 7 + (1 + start % 4) * torch.arange(12)) % 64 for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(path: Path, **overrides: Any) -> Any:
    """Six steps of two examples, a checkpoint after three, every step logged."""
    values = {
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(str(path), **{**values, **overrides})


def trainer(model: torch.nn.Module, args: Any, mode: str, **grass: Any) -> GrassTrainer:
    return GrassTrainer(model, args, train_dataset=examples(), eval_dataset=examples(4), grass={**MODES[mode], **grass})


def checkpoint(path: Path, step: int) -> dict[str, Any]:
    """All that a checkpoint holds of a model, its optimizer and its scheduler."""
    folder = path / f"checkpoint-{step}"
    return {
        "model": safetensors(folder),
        "optimizer": torch.load(folder / "optimizer.pt", weights_only=True),
        "scheduler": torch.load(folder / "scheduler.pt", weights_only=True),
    }


def safetensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equality to the bit, through dictionaries and lists."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), where
    else:
        assert ours == theirs or (isinstance(ours, float) and math.isnan(ours) and math.isnan(theirs)), where


def logged(run: Any, *names: str) -> list[Any]:
    """What the entries of a trainer's ``log_history`` say of ``names``, in order."""
    return [[entry[name] for name in names] for entry in run.state.log_history if names[0] in entry]
