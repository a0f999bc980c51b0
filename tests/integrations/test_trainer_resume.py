"""A run resumed from a checkpoint ends as the one that was never interrupted, bit for bit, whatever else is on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import grass
from grass.compact_mode.layer import CompactLayer
from tests.integrations.runs import MODES, Build, arguments, assert_same, checkpoint, logged, trainer

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "max_grad_norm": {"max_grad_norm": 0.1},
    "bf16": {"bf16": True},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "torch_compile, inductor": {"torch_compile": True},
}
LONG = {
    ("dense", "torch_compile"): pytest.mark.soak,
    ("compact", "torch_compile"): pytest.mark.slow,
    ("compact", "torch_compile, inductor"): pytest.mark.slow,
}
CASES = [
    pytest.param(mode, features, id=f"{mode}-{name}", marks=LONG.get((mode, name), ()))
    for mode in MODES
    for name, features in FEATURES.items()
    if (mode, name) != ("dense", "torch_compile, inductor")  # nothing of ours would be compiled
]


PREPARED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "float32 rows": (lambda model: model.bfloat16(), {"dtype": torch.float32}),
    "converted before": (lambda model: grass.compact(model, rank=4, explore=0, dim=0), {"rank": None}),
    "int8": (lambda model: grass.compact(model, rank=4, explore=0, weights="int8"), {"rank": None}),
}


def run(
    build: Build, path: Path, mode: str, features: dict[str, Any], resume: Path | None = None, seed: int = 0
) -> Any:
    torch.compiler.reset()
    model = build(seed=seed, layers=1 if "torch_compile" in features else 2)  # compiles in half the time
    ours = trainer(model, arguments(path, **features), mode)
    ours.train(resume_from_checkpoint=str(resume) if resume else None)
    return ours


@pytest.mark.parametrize(("mode", "features"), CASES)
def test_resume(tiny_llama: Build, tmp_path: Path, mode: str, features: dict[str, Any]) -> None:
    whole = run(tiny_llama, tmp_path / "whole", mode, features)
    resumed = run(tiny_llama, tmp_path / "resumed", mode, features, tmp_path / "whole/checkpoint-3", seed=1)
    assert_same(checkpoint(tmp_path / "resumed", 6), checkpoint(tmp_path / "whole", 6))
    history = [logged(each, "loss", "grad_norm", "learning_rate", "step") for each in (whole, resumed)]
    assert_same(*history)
    assert len(history[0]) == 6
    grass_logs = [logged(each, "grass_coverage", "grass_turnover", "step") for each in (whole, resumed)]
    assert len(grass_logs[0]) == 6
    assert_same(grass_logs[1][-3:], grass_logs[0][-3:])
    compact = any(isinstance(module, CompactLayer) for module in resumed.model.modules())
    assert compact == (mode == "compact")


@pytest.mark.slow
@pytest.mark.parametrize(("prepare", "keywords"), PREPARED.values(), ids=PREPARED)
def test_resume_in_other_precisions(
    tiny_llama: Build, tmp_path: Path, prepare: Callable[[Any], Any], keywords: dict[str, Any]
) -> None:
    for seed, name in enumerate(("whole", "resumed")):
        model = tiny_llama(seed=seed)
        prepare(model)
        each = trainer(model, arguments(tmp_path / name), "compact", **keywords)
        each.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3") if seed else None)
    assert_same(checkpoint(tmp_path / "resumed", 6), checkpoint(tmp_path / "whole", 6))


def test_resume_under_muon(tiny_llama: Build, tmp_path: Path) -> None:
    """The checkpoint has Muon's moments, AdamW's, and the selection."""
    options = {"optimizer": "muon", "state_policy": "keep", "momentum": 0.9}
    for seed, name in enumerate(("whole", "resumed")):
        ours = trainer(tiny_llama(seed=seed), arguments(tmp_path / name), "compact", **options)
        ours.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3") if seed else None)
    saved = checkpoint(tmp_path / "whole", 6)
    assert_same(checkpoint(tmp_path / "resumed", 6), saved)
    groups = saved["optimizer"]["param_groups"]
    assert {group["muon"] for group in groups if group["weight_decay"]} == {True, False}  # embeddings and head decay
    assert all(group["momentum"] == 0.9 for group in groups if group["muon"])
    states = saved["optimizer"]["state"]
    assert all("momentum_buffer" in states[key] for group in groups if group["muon"] for key in group["params"])
    active, coverage = logged(ours, "grass_active_parameters", "grass_coverage")[-1]
    assert active == sum(p.numel() for group in ours.optimizer.param_groups for p in group["params"])
    assert coverage > 0
