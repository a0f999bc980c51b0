"""TRL's ``SFTTrainer``, by factory and by mixin; resumed, a run ends as if never stopped. Needs the extra ``trl``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.runs import MODES, Build, arguments, assert_same, checkpoint, logged

trl = pytest.importorskip("trl")
tokenizers = pytest.importorskip("tokenizers")
import datasets  # noqa: E402
import transformers  # noqa: E402

from grass.integrations.transformers import GrassCallback, GrassFactory, GrassTrainerMixin  # noqa: E402

WORDS = [f"w{index}" for index in range(61)]


class GrassSFTTrainer(GrassTrainerMixin, trl.SFTTrainer):
    """As the mixin's docstring has it."""


def tokenizer() -> Any:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def instructions(count: int = 24) -> datasets.Dataset:
    """Prompts and completions, whose tokens alone count."""
    words = [[WORDS[(start * 5 + i) % 61] for i in range(10)] for start in range(count)]
    return datasets.Dataset.from_list(
        [{"prompt": " ".join(row[:5]), "completion": " " + " ".join(row[5:])} for row in words]
    )


def run(build: Build, path: Path, mode: str, resume: Path | None = None, seed: int = 0, mixin: bool = True) -> Any:
    values = {k: v for k, v in arguments(path).to_dict().items() if k in KEPT}
    args = trl.SFTConfig(str(path), **values, bf16=False, gradient_checkpointing=False, completion_only_loss=True)
    common = {"args": args, "train_dataset": instructions(), "processing_class": tokenizer()}
    if mixin:
        trainer = GrassSFTTrainer(build(seed=seed), grass=MODES[mode], **common)
    else:
        way_in = (GrassFactory, {"args": args, **MODES[mode]})
        trainer = trl.SFTTrainer(build(seed=seed), optimizer_cls_and_kwargs=way_in, **common)
        trainer.add_callback(GrassCallback(trainer))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


KEPT = {"max_steps", "save_steps", "logging_steps", "per_device_train_batch_size", "learning_rate", "weight_decay"}
KEPT |= {"warmup_steps", "report_to", "use_cpu", "disable_tqdm", "dataloader_pin_memory"}


@pytest.mark.parametrize("mode", MODES)
def test_sft(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    whole = run(tiny_llama, tmp_path / "whole", mode)
    run(tiny_llama, tmp_path / "factory", mode, mixin=False)
    resumed = run(tiny_llama, tmp_path / "resumed", mode, tmp_path / "whole/checkpoint-3", seed=1)
    expected = checkpoint(tmp_path / "whole", 6)
    assert_same(checkpoint(tmp_path / "factory", 6), expected)
    assert_same(checkpoint(tmp_path / "resumed", 6), expected)
    assert_same(logged(resumed, "loss", "step"), logged(whole, "loss", "step"))
    assert len(logged(whole, "grass_turnover", "grass_coverage")) == 6
    opened, info = type(whole.model).from_pretrained(tmp_path / "whole/checkpoint-6", output_loading_info=True)
    assert not any(info.values()), info
    assert not torch.equal(opened.model.layers[0].mlp.up_proj.weight, tiny_llama().model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("mixin", [True, False])
def test_metrics_of_trl_are_logged_once(tiny_llama: Build, tmp_path: Path, mixin: bool) -> None:
    trainer = run(tiny_llama, tmp_path, "compact", mixin=mixin)
    metrics = {"loss", "entropy", "mean_token_accuracy", "num_tokens"}
    assert {key for key in metrics if len(logged(trainer, key)) != 6} == set()
    assert len(logged(trainer, "grass_turnover")) == 6
    assert not any(record.keys() & metrics for record in trainer.state.log_history if "grass_turnover" in record)
