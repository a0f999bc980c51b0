"""Finetuning with ``transformers.Trainer``: data, method and log, whatever the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grass.extras import optional
from grass.streaming.stream import stream
from grass.targets import matched_modules
from training.run.optimizers import OptimizerConfig, warn_of_unread

if TYPE_CHECKING:
    from datasets import DatasetDict
    from transformers import (
        EvalPrediction,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

ADAPTERS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}}
"""What ``peft.LoraConfig`` takes for each kind of adapter."""

METHODS = ("adamw", "grass", *ADAPTERS)

LOG_COLUMNS = {"learning_rate": "lr"}
"""``Trainer``'s names and those of ``metrics.csv``, where they differ."""


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """Where labelled data come from.

    Attributes:
        dataset: on the Hugging Face hub, or a format (``"json"``, ``"csv"``, ``"parquet"``, ...) with ``data_files``.
        subset: configuration of the dataset.
        data_files: files by split, for a format.
        held_out: fraction of the training split to evaluate on where there is no split of the name ``validation``.
    """

    dataset: str
    subset: str | None = None
    data_files: dict[str, str] | None = None
    held_out: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"Invalid held_out={self.held_out}: must be in (0, 1)")

    def load(self) -> DatasetDict:
        """All splits, in memory-mapped files; those without ``train`` are refused.

        Raises:
            ValueError: there is no training split.
        """
        from datasets import load_dataset

        dataset = load_dataset(self.dataset, self.subset, data_files=self.data_files)
        if "train" not in dataset:
            raise ValueError(f"{self.dataset!r} has no split 'train'; there are: {', '.join(dataset)}")
        if not any(name.startswith("validation") for name in dataset):
            parts = dataset["train"].train_test_split(self.held_out, seed=0)
            dataset["train"], dataset["validation"] = parts["train"], parts["test"]
        return dataset


@dataclass(frozen=True, kw_only=True)
class FinetuneTask:
    """A model and what to finetune it on.

    Attributes:
        model: plain; a method converts or wraps it.
        tokenizer: saved with the model.
        dataset: encoded, with the splits ``train`` and ``evaluation``.
        evaluation: splits to evaluate on.
        collator: makes a batch of examples.
        compute_metrics: as ``Trainer``'s.
        best: the metric, or ``"loss"``, by which the best checkpoint is chosen.
        likeliest: as ``Trainer``'s ``preprocess_logits_for_metrics``.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dataset: DatasetDict
    evaluation: tuple[str, ...] = ("validation",)
    collator: Callable[..., Any]
    compute_metrics: Callable[[EvalPrediction], dict[str, float]]
    best: str
    likeliest: Callable[..., Any] | None = None

    def keywords(self, arguments: TrainingArguments) -> dict[str, Any]:
        """What any ``transformers.Trainer`` of the task is made with."""
        evaluation = {name: self.dataset[name] for name in self.evaluation}
        return {
            "model": self.model,
            "args": arguments,
            "data_collator": self.collator,
            "train_dataset": self.dataset["train"],
            "eval_dataset": evaluation if len(evaluation) > 1 else evaluation[self.evaluation[0]],
            "processing_class": self.tokenizer,
            "compute_metrics": self.compute_metrics,
            "preprocess_logits_for_metrics": self.likeliest,
        }


def make_trainer(
    task: FinetuneTask,
    method: str,
    optimizer: OptimizerConfig,
    arguments: TrainingArguments,
    *,
    streams: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """A ``transformers.Trainer`` that trains the task by one of :data:`METHODS`; ``streams``: by :func:`grass.stream`.

    AdamW, for LoRA too, is Trainer's own; Grass is :class:`grass.integrations.transformers.GrassTrainer`. ``arguments``
    get the hyperparameters that all have from ``optimizer``, and the task's best metric.

    Raises:
        ValueError: the method cannot be offloaded or streamed, and that is asked for.
    """
    from transformers import Trainer

    if optimizer.offload and method != "grass":
        raise ValueError(f"--offload does nothing with --method {method}, whose optimizer is Trainer's own AdamW")
    if streams and method != "grass":
        raise ValueError(f"--stream is for --method grass, not {method}")
    if optimizer.weights:
        raise ValueError(
            "--weights does nothing here: Trainer loads a checkpoint before it makes the optimizer, into a model "
            "without a place for int8 codes. Call grass.compact(model, weights='int8') in a script of your own"
        )
    warn_of_unread(optimizer, method, *(["rank"] if method in ADAPTERS else []))
    several = len(task.evaluation) > 1
    arguments.learning_rate, arguments.weight_decay = optimizer.lr, optimizer.weight_decay
    arguments.adam_beta1, arguments.adam_beta2 = optimizer.betas
    arguments.metric_for_best_model = f"{task.evaluation[0]}_{task.best}" if several else task.best
    arguments.greater_is_better = task.best != "loss"
    keywords = {**task.keywords(arguments), "callbacks": [*callbacks]}
    if method == "grass":
        from grass.integrations.transformers import GrassCallback, GrassFactory, GrassTrainer

        mode = "compact" if optimizer.compact else "dense"
        grass = {"mode": mode, "rank": optimizer.rank, "dim": optimizer.grass_dim, **optimizer.grass}
        if optimizer.active_dtype:
            grass["dtype"] = getattr(torch, optimizer.active_dtype)
        if optimizer.offload:
            grass["offload"] = optimizer.host
        if not streams:
            return GrassTrainer(grass=grass, **keywords)
        built = GrassFactory()(task.model, args=arguments, **grass)  # before Trainer moves the model to the device
        stream(task.model, arguments.device, offload_activations=True, offload=optimizer.host)
        trainer = Trainer(optimizers=(built, None), **keywords)
        trainer.add_callback(GrassCallback(trainer))
        return trainer
    if method in ADAPTERS:
        keywords["model"] = add_adapters(task.model, method, optimizer.rank, classification=task.likeliest is None)
    return Trainer(**keywords)


def add_adapters(model: PreTrainedModel, kind: str, rank: int | float, *, classification: bool) -> Any:
    """The model with adapters (``peft``, ``alpha = 2 rank``) on the layers that Grass would train.

    ``kind`` is one of :data:`ADAPTERS`. All other weights are frozen; a classifier's head trains.

    Raises:
        ImportError: ``peft`` is not installed.
        ValueError: the rank is no integer.
    """
    if not isinstance(rank, int):
        raise ValueError(f"Invalid {rank=} for {kind}: must be an integer")
    from peft import LoraConfig, TaskType, get_peft_model

    task = TaskType.SEQ_CLS if classification else TaskType.CAUSAL_LM
    layers = matched_modules(model)
    config = LoraConfig(task_type=task, r=rank, lora_alpha=2 * rank, target_modules=layers, **ADAPTERS[kind])
    return get_peft_model(model, config)


def not_projected(model: PreTrainedModel) -> list[nn.Parameter]:
    """What Grass would not project: embeddings, norms, biases and heads. LoRA freezes all but a classifier's head."""
    projected = {model.get_submodule(name).weight for name in matched_modules(model)}
    return [parameter for parameter in model.parameters() if parameter not in projected]


def write_log(history: list[dict[str, float]], path: Path) -> None:
    """``Trainer``'s ``state.log_history`` as a CSV with one row for each step that logged."""
    pd = optional("pandas", "The log of a run")
    rows: dict[float, dict[str, float]] = {}
    for entry in history:
        rows.setdefault(entry["step"], {}).update(entry)
    pd.DataFrame(rows.values()).rename(columns=LOG_COLUMNS).sort_values("step").to_csv(path, index=False)
