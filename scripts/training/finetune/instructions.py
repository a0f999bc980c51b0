"""Instruction tuning on Alpaca-style examples: only responses are trained on, padded or several in a row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grass.labels import IGNORED
from training.finetune.run import FinetuneTask

if TYPE_CHECKING:
    from datasets import DatasetDict
    from transformers import EvalPrediction, PreTrainedTokenizerBase


def prompt(instruction: str, context: str | None = None) -> str:
    """The text before a response."""
    parts = [("Instruction", instruction), ("Input", context)] if context else [("Instruction", instruction)]
    return "".join(f"### {title}\n{text}\n\n" for title, text in parts) + "### Response\n"


def finetune_task(
    path: str | Path, dataset: DatasetDict, *, max_length: int, packed: bool, dtype: torch.dtype | str = torch.float32
) -> FinetuneTask:
    """The pretrained causal language model at ``path``, and the data encoded for it, ``packed`` in rows or not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, default_data_collator

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dataset = encode(dataset, tokenizer, max_length)
    return FinetuneTask(
        model=model,
        tokenizer=tokenizer,
        dataset=pack(dataset, max_length, tokenizer.pad_token_id) if packed else dataset,
        collator=default_data_collator if packed else DataCollatorForSeq2Seq(tokenizer),
        compute_metrics=response_metrics,
        best="loss",
        likeliest=likeliest,
    )


def encode(dataset: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
    """Every example as ``input_ids`` and ``labels``: prompt, response and end, cut to ``max_length``.

    Examples have an ``instruction``, an ``output`` and possibly an ``input``, which may be empty. Labels of the prompt
    are :data:`IGNORED`. Examples whose prompt leaves no room for a response are dropped.

    Raises:
        ValueError: a column is missing, no example is left, or the tokenizer has no ``eos_token``.
    """
    columns = dataset["train"].column_names
    if not {"instruction", "output"} <= set(columns):
        raise ValueError(f"Instruction tuning needs the columns instruction and output; there are: {columns}")
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no eos_token to end responses with")
    encoded = dataset.map(lambda row: _encode_one(row, tokenizer, max_length), remove_columns=columns)
    encoded = encoded.filter(lambda row: row["labels"][-1] != IGNORED)
    for name, split in encoded.items():
        if not len(split):
            raise ValueError(f"Every prompt of the split {name!r} fills {max_length=} tokens: raise it")
    return encoded


def _encode_one(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[int]]:
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    asked = start + _ids(tokenizer, prompt(row["instruction"], row.get("input")))
    answer = [*_ids(tokenizer, row["output"]), tokenizer.eos_token_id]
    labels = [IGNORED] * len(asked) + answer
    return {"input_ids": (asked + answer)[:max_length], "labels": labels[:max_length]}


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def pack(dataset: DatasetDict, max_length: int, padding: int) -> DatasetDict:
    """Examples one after another in rows of ``max_length``: far less padding.

    No example is divided. Each has its own ``position_ids`` from 0 on, by which ``transformers`` models without an
    ``attention_mask`` keep the attention of one example off the others; so does the padding at the end of a row.
    """

    def rows(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        examples = zip(batch["input_ids"], batch["labels"], strict=True)
        packed = [_pad(row, max_length, padding) for row in _filled(examples, max_length)]
        return {key: [row[key] for row in packed] for key in ("input_ids", "labels", "position_ids")}

    return dataset.map(rows, batched=True, remove_columns=dataset["train"].column_names)


Example = tuple[list[int], list[int]]


def _filled(examples: Iterable[Example], max_length: int) -> list[list[Example]]:
    """The examples in order, a new row begun where one does not fit."""
    rows: list[list[Example]] = [[]]
    for example in examples:
        if sum(len(ids) for ids, _ in rows[-1]) + len(example[0]) > max_length:
            rows.append([])
        rows[-1].append(example)
    return rows


def _pad(row: list[Example], max_length: int, padding: int) -> dict[str, list[int]]:
    rest = max_length - sum(len(ids) for ids, _ in row)
    row = [*row, ([padding] * rest, [IGNORED] * rest)]
    return {
        "input_ids": [token for ids, _ in row for token in ids],
        "labels": [label for _, labels in row for label in labels],
        "position_ids": [position for ids, _ in row for position in range(len(ids))],
    }


def likeliest(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """``Trainer``'s ``preprocess_logits_for_metrics``: predicted tokens, so that logits need not be kept."""
    if isinstance(logits, tuple):
        logits = logits[0]
    return torch.argmax(logits, -1)


def response_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Share of the response tokens that are the likeliest ones at their place."""
    tokens, labels = np.asarray(prediction.predictions)[:, :-1], np.asarray(prediction.label_ids)[:, 1:]
    counted = labels != IGNORED
    return {"token_accuracy": float((tokens == labels)[counted].mean())}


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
