"""A pretraining cell of a study: a LLaMA from scratch."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from grid import CURVE_POINTS, Cell
from results import CURVE

from grass.memory.llama import llama_config

sys.path.append(str(Path(__file__).parents[1]))
from training.data.blocks import DataConfig
from training.data.loading import load_data
from training.run.checkpoint import CheckpointStore
from training.run.config import TrainConfig
from training.run.loop import Trainer
from training.run.models import build_llama
from training.run.optimizers import build_optimizer


def pretrain(cell: Cell, data_config: DataConfig, out: Path, device: str = "cpu") -> dict[str, Any] | None:
    """Train; the values of the cell's row, or ``None`` if a signal stopped it before the last step.

    The initial weights are drawn on the CPU: they are the same on every device. In ``out`` are metrics and, until the
    last step, a checkpoint of each evaluation, from which the next call goes on bit for bit.
    """
    data = load_data(replace(data_config, seed=cell.seed, batch_size=cell.batch_size or data_config.batch_size))
    config = llama_config(cell.model, vocab_size=data.vocab_size, max_seq_len=data_config.seq_len)
    dtype = torch.bfloat16 if cell.bf16_weights else torch.float32
    model = build_llama(config, seed=cell.seed, dtype=dtype).to(device)
    interval = cell.steps // CURVE_POINTS
    train_config = TrainConfig(
        out=out,
        steps=cell.steps,
        warmup=interval,
        clip=cell.clip,
        final_lr=cell.final_lr,
        autocast=cell.autocast,
        eval_every=interval,
        log_every=interval,
        save_every=interval,
    )
    checkpoints = CheckpointStore(out / "checkpoints", keep=1) if cell.optimizer.resumable else None
    trainer = Trainer(model, build_optimizer(model, cell.optimizer), data, train_config, checkpoints)
    trainer.resume()
    result = trainer.run()
    if result.step < cell.steps:
        return None
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    losses = pd.read_csv(out / "metrics.csv")["eval_loss"].dropna()
    return {
        "tokens": cell.steps * trainer.tokens_per_step,
        "state_bytes": result.state_bytes.device,
        "host_bytes": result.state_bytes.host,
        "gradient_bytes": result.gradient_bytes,
        **{name: f"{loss:.4f}" for name, loss in zip(CURVE, losses, strict=True)},
    }
