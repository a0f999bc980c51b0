"""Offloaded under Trainer, accelerate and Lightning: bit for bit the resident run, and what is saved is right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from grass import Offload
from tests.integrations.runs import MODES, Build, arguments, assert_same, checkpoint, logged, safetensors, trainer

SLOW = Offload(_bytes_per_second=2e6)
"""A step of the tests' model takes a tenth of a second and is under way when Trainer saves."""

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, clipping, bf16": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("mode", MODES)
def test_trainer(tiny_llama: Build, tmp_path: Path, mode: str, features: dict[str, Any]) -> None:
    runs = []
    for name, offload in (("resident", None), ("offloaded", SLOW)):
        run = trainer(tiny_llama(), arguments(tmp_path / name, **features), mode, offload=offload)
        run.train()
        runs.append([logged(run, *names) for names in (("loss", "grad_norm"), ("eval_loss",), ("grass_turnover",))])
    assert_same(*runs)
    for step in (3, 6):
        assert_same(checkpoint(tmp_path / "offloaded", step), checkpoint(tmp_path / "resident", step))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [None, "cpu"], ids=["resident first", "offloaded first"])
def test_trainer_resumes_as_the_other(tiny_llama: Build, tmp_path: Path, mode: str, first: str | None) -> None:
    second = "cpu" if first is None else None
    trainer(tiny_llama(), arguments(tmp_path / "whole"), mode, offload=first).train()
    resumed = trainer(tiny_llama(seed=1), arguments(tmp_path / "resumed"), mode, offload=second)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3"))
    assert_same(checkpoint(tmp_path / "resumed", 6), checkpoint(tmp_path / "whole", 6))


def test_the_options_of_trainer_switch_it_on(tiny_llama: Build, tmp_path: Path) -> None:
    args = arguments(tmp_path, optim_args="offload=cpu, betas=(0.7, 0.8), update_interval=3", max_steps=1)
    run = trainer(tiny_llama(), args, "compact")
    run.train()
    (optimizer,) = (run.optimizer.optimizer,)
    assert optimizer.offload is not None
    assert optimizer.param_groups[0]["update_interval"] == MODES["compact"]["update_interval"], "keywords win"
    assert optimizer.param_groups[0]["betas"] == (0.7, 0.8)
    (state,) = logged(run, "grass_state_device_bytes", "grass_state_host_bytes")
    assert state[0] == 0 < state[1]


@pytest.mark.parametrize("text", ["offlaod=cpu", "offload", "rank=3", "offload=cpu,"])
def test_options_of_trainer_that_are_none(tiny_llama: Build, tmp_path: Path, text: str) -> None:
    run = trainer(tiny_llama(), arguments(tmp_path, optim_args=text), "compact")
    with pytest.raises(
        ValueError, match="Invalid optim_args=" + (".*give rank to GrassFactory" if text == "rank=3" else "")
    ):
        run.create_optimizer()


@pytest.mark.parametrize("mode", MODES)
def test_saved_by_accelerate_right_after_a_step(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    factory = pytest.importorskip("grass.integrations.transformers").GrassFactory()
    saved = []
    for name, offload in (("resident", None), ("offloaded", SLOW)):
        accelerator = accelerate.Accelerator(cpu=True)
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, factory(model, offload=offload, **MODES[mode]))
        for step in range(4):
            tokens = torch.arange(24).view(2, 12) + step
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, tmp_path / name / "model")
        accelerator.save_state(tmp_path / name)
        state = torch.load(tmp_path / name / "optimizer.bin", weights_only=True)
        saved.append([safetensors(tmp_path / name / "model"), safetensors(tmp_path / name), state])
        accelerator.free_memory()
    assert_same(*saved)
    assert_same(saved[1][0], copy.deepcopy(saved[1][1]))
