"""A finetuning cell of a study: the base model, trained by ``transformers.Trainer``, whatever the optimizer."""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from base import other_files
from datasets import DatasetDict
from grid import CURVE_POINTS, Cell, FinetuneConfig
from results import CURVE
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from grass.memory import state_bytes

sys.path.append(str(Path(__file__).parents[1]))
from training.data.corpus import split_by_file, text_files
from training.data.docstrings import docstrings_of_signatures, packages_of_docstrings
from training.data.facts import facts
from training.finetune import classification, instructions
from training.finetune.run import FinetuneTask, add_adapters, not_projected
from training.run.metrics import gradient_bytes
from training.run.models import seeded
from training.run.optimizers import build_optimizer
from training.run.signals import GracefulStop


def finetune(cell: Cell, config: FinetuneConfig, base: Path) -> dict[str, Any] | None:
    """Train; the values of the cell's row, or ``None`` if a signal stopped it before the last step."""
    task = finetune_task(cell, config, base)
    model = trained_model(task, cell)
    optimizer = build_optimizer(model, cell.optimizer)
    with tempfile.TemporaryDirectory() as out, GracefulStop() as stop:
        watch = Watch(stop)
        arguments = training_arguments(cell, config, out)
        trainer = Trainer(
            **task.keywords(arguments) | {"model": model}, optimizers=(optimizer, None), callbacks=[watch]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if trainer.state.global_step < cell.steps:
        return None
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    accuracy = evaluations[-1]["eval_accuracy" if cell.task == "classify" else "eval_token_accuracy"]
    size = state_bytes(optimizer)
    return {
        "tokens": trainer.state.num_input_tokens_seen,
        "state_bytes": size.device,
        "host_bytes": size.host,
        "gradient_bytes": watch.gradient_bytes,
        **{name: f"{entry['eval_loss']:.4f}" for name, entry in zip(CURVE, evaluations, strict=True)},
        "accuracy": f"{accuracy:.4f}",
        "trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "pretraining_loss": "" if cell.task == "classify" else f"{pretraining_loss(model, base):.4f}",
    }


def trained_model(task: FinetuneTask, cell: Cell) -> nn.Module:
    """The task's model as the cell trains it: with an adapter or without, with all that is not projected or without."""
    model, others = task.model, not_projected(task.model)
    if cell.task == "classify":  # its head is new
        others = [parameter for parameter in others if parameter is not model.score.weight]
    if cell.adapter is not None:
        with seeded(cell.seed, torch.device("cpu")):
            model = add_adapters(model, cell.adapter, cell.adapter_rank or 0, classification=cell.task == "classify")
    for parameter in others:
        parameter.requires_grad_(not cell.only_projected)
    return model


@torch.no_grad()
def pretraining_loss(model: nn.Module, base: Path) -> float:
    """Mean loss, nats per token, on files that the base model was not trained on: how much it has forgotten."""
    model.eval()
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in held_out_blocks(base).split(16)]
    return sum(losses) / len(losses)


@cache
def held_out_blocks(base: Path) -> Tensor:
    """The first 64 blocks of 256 tokens of the files held out from the base model's pretraining, ``(64, 256)``."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    _, documents = split_by_file(text_files(other_files()))
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document.text, verbose=False)["input_ids"]
        if len(ids) >= 64 * 256:
            break
    return torch.tensor(ids[: 64 * 256]).view(64, 256)


def finetune_task(cell: Cell, config: FinetuneConfig, base: Path) -> FinetuneTask:
    """The base model and its data; the seed of the cell makes the head of a classifier."""
    with seeded(cell.seed, torch.device("cpu")):
        if cell.task == "classify":
            task, dataset = classification.Task(), _part(packages_of_docstrings(), config.examples)
            return classification.finetune_task(base, task, dataset, max_length=config.max_length)
        dataset = _part(facts() if cell.task == "facts" else docstrings_of_signatures(), config.examples)
        return instructions.finetune_task(base, dataset, max_length=config.max_length, packed=True)


def _part(dataset: DatasetDict, examples: int | None) -> DatasetDict:
    return DatasetDict({name: split.take(min(examples or len(split), len(split))) for name, split in dataset.items()})


def training_arguments(cell: Cell, config: FinetuneConfig, out: str) -> TrainingArguments:
    """What all methods train with: a tenth of warm-up, linear decay, clipping, and evaluations at equal distances.

    The held-out examples are one batch: Trainer would weigh the mean losses of several alike, whatever they hold.
    """
    interval = cell.steps // CURVE_POINTS
    return TrainingArguments(
        output_dir=out,
        seed=cell.seed,
        max_steps=cell.steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=1_000_000,
        warmup_steps=interval,
        lr_scheduler_type="linear",
        max_grad_norm=cell.clip,
        eval_strategy="steps",
        eval_steps=interval,
        save_strategy="no",
        logging_strategy="no",
        include_num_input_tokens_seen="non_padding",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=cell.autocast,
        dataloader_pin_memory=False,
    )


class Watch(TrainerCallback):
    """Measures gradients before Trainer drops them, and ends the training where a signal asks for it."""

    def __init__(self, stop: GracefulStop) -> None:
        self.stop = stop
        self.gradient_bytes = 0

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Measure."""
        self.gradient_bytes = gradient_bytes(kw["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """End the training."""
        control.should_training_stop |= self.stop.requested
