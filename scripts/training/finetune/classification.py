"""Sequence classification: the GLUE tasks by name, the docstrings of Python, or a dataset of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from training.data.docstrings import packages_of_docstrings
from training.finetune.run import DatasetSource, FinetuneTask

if TYPE_CHECKING:
    from datasets import DatasetDict
    from transformers import EvalPrediction, PreTrainedTokenizerBase

Array = NDArray[Any]

METRICS: dict[str, Callable[[Array, Array], float]] = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "matthews_correlation": matthews_corrcoef,
    "pearson": lambda labels, scores: pearsonr(labels, scores).statistic,
    "spearman": lambda labels, scores: spearmanr(labels, scores).statistic,
}
"""``metric(labels, predictions)``."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a classification task reads and how it is judged.

    Attributes:
        columns: of one text, or of two that are encoded as a pair.
        metrics: names in :data:`METRICS`; the first one picks the best checkpoint.
        label: the column of the label: a class, or for regression a float.
        evaluation: splits to evaluate on; the first one picks the best checkpoint.
    """

    columns: tuple[str, ...] = ("text",)
    metrics: tuple[str, ...] = ("accuracy",)
    label: str = "label"
    evaluation: tuple[str, ...] = ("validation",)

    def __post_init__(self) -> None:
        if not 1 <= len(self.columns) <= 2:
            raise ValueError(f"Invalid columns={self.columns}: must be the names of one or two text columns")


GLUE = {
    "cola": Task(columns=("sentence",), metrics=("matthews_correlation", "accuracy")),
    "mnli": Task(columns=("premise", "hypothesis"), evaluation=("validation_matched", "validation_mismatched")),
    "mrpc": Task(columns=("sentence1", "sentence2"), metrics=("f1", "accuracy")),
    "qnli": Task(columns=("question", "sentence")),
    "qqp": Task(columns=("question1", "question2"), metrics=("f1", "accuracy")),
    "rte": Task(columns=("sentence1", "sentence2")),
    "sst2": Task(columns=("sentence",)),
    "stsb": Task(columns=("sentence1", "sentence2"), metrics=("pearson", "spearman")),
    "wnli": Task(columns=("sentence1", "sentence2")),
}
"""The tasks of Wang et al., 2019, with the metrics they are published with."""

TASKS = ("docstrings", *GLUE)


def load_task(name: str) -> tuple[Task, DatasetDict]:
    """A task by name, from :data:`TASKS`, and its data; GLUE comes from the Hugging Face hub.

    Raises:
        ValueError: the name is unknown.
    """
    if name == "docstrings":
        return Task(), packages_of_docstrings()
    if name not in GLUE:
        raise ValueError(f"Unknown task {name!r}; available: {', '.join(TASKS)}")
    return GLUE[name], DatasetSource(dataset="nyu-mll/glue", subset=name).load()


def own_task(source: DatasetSource, columns: Sequence[str], label: str) -> tuple[Task, DatasetDict]:
    """A task on any dataset, judged by accuracy where its labels are classes, else by correlation."""
    dataset = with_class_labels(source.load(), label)
    metrics = ("accuracy",) if class_names(dataset, label) else ("pearson", "spearman")
    return Task(columns=tuple(columns), metrics=metrics, label=label), dataset


def with_class_labels(dataset: DatasetDict, label: str) -> DatasetDict:
    """The dataset with its labels as classes 0, 1, ...: strings and integers by the order of their values.

    Floats stay, for regression. Classes are those of the training split.

    Raises:
        ValueError: there is no such column, or another split has a label that the training split lacks.
    """
    from datasets import ClassLabel

    if label not in dataset["train"].column_names:
        raise ValueError(f"No column {label!r} for labels; columns: {', '.join(dataset['train'].column_names)}")
    feature = dataset["train"].features[label]
    if isinstance(feature, ClassLabel) or feature.dtype.startswith("float"):
        return dataset
    values = sorted(set(dataset["train"][label]))
    place = {value: index for index, value in enumerate(values)}
    unknown = {value for split in dataset.values() for value in split[label]} - place.keys()
    if unknown:
        raise ValueError(f"Labels that no training example has: {', '.join(map(repr, sorted(unknown)))}")
    encoded = dataset.map(lambda row: {label: place[row[label]]})
    return encoded.cast_column(label, ClassLabel(names=[str(value) for value in values]))


def class_names(dataset: DatasetDict, label: str) -> list[str] | None:
    """The classes; ``None`` for regression."""
    return getattr(dataset["train"].features[label], "names", None)


def finetune_task(
    path: str | Path, task: Task, dataset: DatasetDict, *, max_length: int, dtype: torch.dtype | str = torch.float32
) -> FinetuneTask:
    """The pretrained model at ``path`` with a new head, whose weights are random, and the data encoded for it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    names = class_names(dataset, task.label) or ["score"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(names), dtype=dtype)
    model.accepts_loss_kwargs = False  # a mean over examples, which Trainer else takes for a share of the whole batch's
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
    return FinetuneTask(
        model=model,
        tokenizer=tokenizer,
        dataset=encode(dataset, task, tokenizer, max_length),
        evaluation=task.evaluation,
        collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=metrics_of(task),
        best=task.metrics[0],
    )


def encode(dataset: DatasetDict, task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
    """Texts, or pairs of them, as token ids cut to ``max_length``, and ``labels``."""
    missing = set(task.columns) - set(dataset["train"].column_names)
    if missing:
        raise ValueError(f"No column {sorted(missing)}; columns: {', '.join(dataset['train'].column_names)}")

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, Any]:
        ids = tokenizer(*(batch[column] for column in task.columns), truncation=True, max_length=max_length)
        return {**ids, "labels": batch[task.label]}

    return dataset.map(tokenize, batched=True, remove_columns=dataset["train"].column_names)


def metrics_of(task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """``Trainer``'s ``compute_metrics``: the task's metrics of the likeliest classes, or of the scores."""

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        outputs, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        answers = outputs.argmax(-1) if outputs.shape[-1] > 1 else outputs.squeeze(-1)
        return {name: float(METRICS[name](labels, answers)) for name in task.metrics}

    return compute
