"""A tiny LLaMA as torchtitan's ``--module titan.model --config tiny``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig, derive
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.trainer import Trainer

FOLDER = "GRASS_TITAN_DATA"
"""The environment variable with the folder of text and tokenizer."""


class Causal(Llama3Model):
    """Without flex attention, which has no backward on a CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """As LLaMA's."""

    def get_attention_masks(self, positions: Any) -> None:
        """None: attention is causal, also over the borders of documents."""


def tiny() -> Trainer.Config:
    """Two of the six layers of torchtitan's debug model; six steps of four sequences."""
    folder, spec = Path(os.environ[FOLDER]), model_registry("debugmodel", attn_backend="flex")
    spec.model = derive(spec.model, Causal.Config, layers=spec.model.layers[:2])
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    training = {"local_batch_size": 2, "global_batch_size": 4, "seq_len": 64, "steps": 6}
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        hf_assets_path=str(folder / "tokenizer"),
        model_spec=spec,
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(**training, mixed_precision_param="float32", disable_cuda_graphs=True),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(folder / "text")),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(interval=3, last_save_model_only=False),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
    )
