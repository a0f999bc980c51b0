"""Lightning's ``configure_optimizers``; resumed, a run ends as if never stopped. Needs the extra ``lightning``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import grass
from tests.integrations.runs import MODES, Build, assert_same, examples

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):
    """Converted in its constructor; the optimizer is an ordinary one."""

    def __init__(self, model: torch.nn.Module, mode: str, **options: Any) -> None:
        super().__init__()
        self.model, self.mode = model, mode
        self.options = {key: value for key, value in MODES[mode].items() if key not in ("mode", "rank", "dim")}
        self.options |= options
        if mode == "compact":
            grass.compact(model, rank=4, explore=0)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        params = self.model if self.mode == "compact" else grass.param_groups(self.model, rank=4, dim=1)
        optimizer = grass.GrassAdamW(params, lr=1e-2, **self.options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit(
    build: Build,
    path: Path,
    mode: str,
    resume: Path | None = None,
    seed: int = 0,
    offload: grass.Offload | None = None,
    **options: Any,
) -> Module:
    """Three steps an epoch, two epochs, a checkpoint after each."""
    module = Module(build(seed=seed), mode, offload=offload)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(path, "{epoch}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=2, callbacks=[saving], default_root_dir=path, **quiet, **options)
    batches = torch.utils.data.DataLoader(examples(6), batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and the like
        trainer.fit(module, batches, ckpt_path=resume, weights_only=True)
    return module


def contents(path: Path, epoch: int) -> dict[str, Any]:
    saved = torch.load(path / f"epoch={epoch}.ckpt", weights_only=True)
    return {key: saved[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}], ids=["plain", "clipping, accumulation"]
)
def test_fit_and_resume(tiny_llama: Build, tmp_path: Path, mode: str, options: dict[str, Any]) -> None:
    fit(tiny_llama, tmp_path / "whole", mode, **options)
    fit(tiny_llama, tmp_path / "resumed", mode, tmp_path / "whole/epoch=0.ckpt", seed=1, **options)
    assert_same(contents(tmp_path / "resumed", 1), contents(tmp_path / "whole", 1))
    assert contents(tmp_path / "whole", 1)["global_step"] == 6 // options.get("accumulate_grad_batches", 1)


@pytest.mark.parametrize("mode", MODES)
def test_offloaded_and_resident_runs_are_one(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    """Also where the second epoch is the other's; a checkpoint is saved while a step is under way."""
    slow = grass.Offload(_bytes_per_second=2e6)
    fit(tiny_llama, tmp_path / "resident", mode)
    fit(tiny_llama, tmp_path / "offloaded", mode, offload=slow)
    for epoch in (0, 1):
        assert_same(contents(tmp_path / "offloaded", epoch), contents(tmp_path / "resident", epoch))
    fit(tiny_llama, tmp_path / "resumed", mode, tmp_path / "resident/epoch=0.ckpt", seed=1, offload=slow)
    assert_same(contents(tmp_path / "resumed", 1), contents(tmp_path / "resident", 1))


@pytest.mark.parametrize("mode", MODES)
def test_equals_a_plain_loop(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    fitted, looped = fit(tiny_llama, tmp_path, mode), Module(tiny_llama(), mode)
    (optimizer,), (scheduler,) = looped.configure_optimizers()
    for epoch in range(2):
        for index, batch in enumerate(torch.utils.data.DataLoader(examples(6), batch_size=2)):
            optimizer.zero_grad()
            looped.training_step(batch, epoch * 3 + index).backward()
            optimizer.step()
        scheduler.step()
    assert_same(dict(fitted.state_dict()), dict(looped.state_dict()))


class ConvertsLate(Module):
    """Where Lightning has wrapped the module by DDP."""

    def configure_optimizers(self) -> Any:
        grass.compact(self.model, rank=4)
        return grass.GrassAdamW(self.model)


def test_converting_in_configure_optimizers_under_ddp(tiny_llama: Build, tmp_path: Path) -> None:
    module = ConvertsLate(tiny_llama(), "dense")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=1, strategy="ddp", devices=1, default_root_dir=tmp_path, **quiet)
    with patch.dict(os.environ):  # Lightning leaves ranks there, by which other trainers would start a process group
        try:
            with pytest.raises(RuntimeError, match=r"Too late to convert: .* in Lightning, in the module"):
                trainer.fit(module, torch.utils.data.DataLoader(examples(6), batch_size=2))
        finally:
            torch.distributed.destroy_process_group()
    assert not any(hasattr(layer, "active") for layer in module.modules())


def test_pruning_of_converted_layers_is_refused(tiny_llama: Build, tmp_path: Path) -> None:
    """``ModelPruning`` puts another tensor in the place of a weight: the next forward says what to do instead."""
    pruning = lightning.pytorch.callbacks.ModelPruning("l1_unstructured", amount=0.5)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=[pruning], default_root_dir=tmp_path, enable_checkpointing=False, **quiet
    )
    batches = torch.utils.data.DataLoader(examples(6), batch_size=2)
    module = Module(tiny_llama(), "compact")
    with pytest.raises(RuntimeError, match=r"is no longer its parameter: apply .* before"):
        trainer.fit(module, batches)
