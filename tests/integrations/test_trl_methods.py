"""TRL's trainers by one mixin: with every column they train as by AdamW. Needs the extra ``trl``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.runs import Build
from tests.integrations.test_trl import WORDS, tokenizer

trl = pytest.importorskip("trl")
import datasets  # noqa: E402
import transformers  # noqa: E402

from grass.integrations.transformers import GrassTrainer, GrassTrainerMixin  # noqa: E402

COMMON = {
    "max_steps": 3,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}
GENERATION = {"num_generations": 2, "max_completion_length": 4}
WHOLE = {"rank": 1.0, "explore": 0}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""float32, three steps of 1e-2: Adam divides gradients that are near zero by their own size."""


class GrassDPOTrainer(GrassTrainerMixin, trl.DPOTrainer):
    """As the mixin's docstring has it."""


class GrassRewardTrainer(GrassTrainerMixin, trl.RewardTrainer):
    """As the mixin's docstring has it."""


class GrassGRPOTrainer(GrassTrainerMixin, trl.GRPOTrainer):
    """As the mixin's docstring has it."""


def preferences() -> datasets.Dataset:
    """Which of two answers is better."""
    words = [[WORDS[(start * 5 + i) % 61] for i in range(9)] for start in range(12)]
    return datasets.Dataset.from_list(
        [
            {"prompt": " ".join(w[:3]), "chosen": " " + " ".join(w[3:6]), "rejected": " " + " ".join(w[6:])}
            for w in words
        ]
    )


def longer_words(completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs between completions."""
    return [float(len(text)) for text in completions]


def scorer(model: torch.nn.Module) -> torch.nn.Module:
    """A reward model of the same body."""
    config = transformers.LlamaConfig(**{**model.config.to_dict(), "num_labels": 1, "pad_token_id": 0})
    torch.manual_seed(0)
    made = transformers.LlamaForSequenceClassification(config)
    made.model.load_state_dict(model.model.state_dict())
    return made


def same(model: torch.nn.Module) -> torch.nn.Module:
    return model


METHODS: dict[str, tuple[type, type, type, Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "dpo": (GrassDPOTrainer, trl.DPOTrainer, trl.DPOConfig, same, {}, {}),
    "reward": (GrassRewardTrainer, trl.RewardTrainer, trl.RewardConfig, scorer, {}, {}),
    "grpo": (GrassGRPOTrainer, trl.GRPOTrainer, trl.GRPOConfig, same, GENERATION, {"reward_funcs": longer_words}),
}
"""Trainer with the mixin and without, arguments, model, arguments of its own, keywords of its own."""


@pytest.mark.parametrize("method", METHODS)
def test_every_column_is_adamw(tiny_llama: Build, tmp_path: Path, method: str) -> None:
    ours, theirs, config, build, values, keywords = METHODS[method]
    models = []
    if method == "dpo":  # else TRL reads the reference model from the hub, by name
        keywords = {"ref_model": tiny_llama()}
    for cls, more in ((theirs, {}), (ours, {"grass": WHOLE}), (ours, {"grass": {"rank": 4}})):
        transformers.set_seed(0)
        model = build(tiny_llama())
        args = config(str(tmp_path), **COMMON, **values)
        trainer = cls(model, args=args, train_dataset=preferences(), processing_class=tokenizer(), **keywords, **more)
        trainer.train()
        assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == COMMON["max_steps"]
        models.append(dict(model.state_dict()))
    adamw, whole, some = models
    torch.testing.assert_close(whole, adamw, **CLOSE)
    before = build(tiny_llama()).state_dict()
    weight = "model.layers.0.mlp.up_proj.weight"
    columns = {name: (value[weight] != before[weight]).any(0) for name, value in (("whole", whole), ("some", some))}
    assert columns["whole"].all()
    assert columns["some"].any()


def test_a_reference_that_follows_is_refused(tiny_llama: Build, tmp_path: Path) -> None:
    """The callback of ``sync_ref_model``, put in by hand."""
    callback = trl.trainer.callbacks.SyncRefModelCallback(tiny_llama(), None)
    rows = [{"input_ids": [k % 60] * 8, "labels": [k % 60] * 8} for k in range(8)]
    args = transformers.TrainingArguments(str(tmp_path), **COMMON)
    trainer = GrassTrainer(tiny_llama(), args, train_dataset=rows, callbacks=[callback], grass={"rank": 0.5})
    with pytest.raises(ValueError, match=r"SyncRefModelCallback.*mode='dense'"):
        trainer.train()


@pytest.mark.parametrize("mode", ["compact", "dense"])
def test_averages_by_order_are_refused(mode: str, tiny_llama: Build, tmp_path: Path) -> None:
    """``BEMACallback`` pairs parameters: it would copy active columns to wrong places, where their shapes fit."""
    rows = [{"input_ids": [k % 60] * 8, "labels": [k % 60] * 8} for k in range(8)]
    trainer = GrassTrainer(
        tiny_llama(),
        transformers.TrainingArguments(str(tmp_path), **COMMON),
        train_dataset=rows,
        callbacks=[trl.BEMACallback(update_freq=1, update_after=1)],
        grass={"rank": 0.5, "mode": mode},
    )
    if mode == "dense":
        trainer.train()
    else:
        with pytest.raises(ValueError, match=r"BEMACallback.*mode='dense'"):
            trainer.train()
