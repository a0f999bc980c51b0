"""Trainer with a model that is a plain module, whose ``state_dict`` it saves as safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import grass
from grass.integrations.transformers import GrassTrainer
from tests.compact_mode.networks import Network, batches, loss_of
from tests.integrations.runs import assert_same, checkpoint

transformers = pytest.importorskip("transformers")


class WithLoss(nn.Module):
    """Returns its loss, as Trainer wants it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.network = Network(seed=seed)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.network, (x, labels))}


@pytest.mark.parametrize("before", [False, True], ids=["by Trainer", "converted before"])
def test_saves_and_resumes(tmp_path: Path, before: bool) -> None:
    data = [{"x": x[0], "labels": y[0]} for x, y in batches(8, size=1)]
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    for seed, resume in ((0, None), (1, str(tmp_path / "0/checkpoint-2"))):
        arguments = transformers.TrainingArguments(str(tmp_path / str(seed)), **options, disable_tqdm=True)
        model = WithLoss(seed)
        if before:
            grass.compact(model, rank=3, weights="int8")
        trainer = GrassTrainer(
            model, arguments, train_dataset=data, grass={"mode": "compact", "rank": None if before else 3}
        )
        trainer.train(resume_from_checkpoint=resume)
    assert_same(checkpoint(tmp_path / "1", 4), checkpoint(tmp_path / "0", 4))
