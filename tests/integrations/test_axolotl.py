"""axolotl's plugin, with axolotl's own mixin that calls the factory. Skipped where axolotl is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("axolotl", exc_type=ImportError)
pytest.importorskip("numba")
import transformers

from tests.integrations.runs import Build, arguments, assert_same, checkpoint, examples

GRASS = {"rank": 4, "update_interval": 2, "selection": "multinomial_norm", "state_policy": "bank"}


def hosted(build: Build, path: Path, cfg: dict[str, Any], seed: int = 0, **given: Any) -> Any:
    """Hugging Face's Trainer with axolotl's mixin, after axolotl's plugin manager has had it."""
    from axolotl.core.trainers.mixins.optimizer import OptimizerMixin
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    class AxolotlTrainer(OptimizerMixin, transformers.Trainer):
        """As axolotl composes it."""

    args = arguments(path)
    for name in ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups"):
        setattr(args, name, None)
    trainer = AxolotlTrainer(build(seed=seed), args, train_dataset=examples(), **given)
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    manager.register("grass.integrations.axolotl.GrassPlugin")
    manager.post_trainer_create(DictDefault(cfg), trainer)
    return trainer


def test_equals_grass_trainer_and_resumes(tiny_llama: Build, tmp_path: Path) -> None:
    from grass.integrations.transformers import GrassTrainer

    hosted(tiny_llama, tmp_path / "axolotl", {"grass": GRASS}).train()
    GrassTrainer(tiny_llama(), arguments(tmp_path / "plain"), train_dataset=examples(), grass=GRASS).train()
    resumed = hosted(tiny_llama, tmp_path / "resumed", {"grass": GRASS}, seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "axolotl/checkpoint-3"))
    assert_same(checkpoint(tmp_path / "axolotl", 6), checkpoint(tmp_path / "plain", 6))
    assert_same(checkpoint(tmp_path / "resumed", 6), checkpoint(tmp_path / "axolotl", 6))


def test_its_arguments_join_axolotls() -> None:
    from importlib import import_module

    from grass.integrations.axolotl import GrassPlugin

    module, _, name = GrassPlugin().get_input_args().rpartition(".")
    assert getattr(import_module(module), name)(grass=GRASS).grass == GRASS


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({}, "has no 'grass'"),
        ({"grass": {"rnk": 4}}, "did you mean 'rank'"),
        ({"grass": GRASS, "adapter": "lora"}, "Invalid adapter='lora'"),
    ],
)
def test_what_is_refused(tiny_llama: Build, tmp_path: Path, cfg: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hosted(tiny_llama, tmp_path, cfg)
    with pytest.raises(ValueError, match="must be adamw_torch or adamw_torch_fused"):
        hosted(
            tiny_llama,
            tmp_path,
            {"grass": GRASS, "optimizer": "came_pytorch"},
            optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1.0}),
        )
