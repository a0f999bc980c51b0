"""A tokenizer and a dataset made on the spot."""

import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def documents():
    words = ["grass", "rows", "columns", "gradient", "moment", "optimizer", "step", "weight", "norm", "sample"]
    draw = random.Random(0)
    return [" ".join(draw.choices(words, k=draw.randint(1, 40))) for _ in range(300)]


@pytest.fixture(scope="session")
def tokenizer_path(documents, tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def json_files(documents, tmp_path_factory):
    """Two training files and one for evaluation, as ``data_files``."""
    path = tmp_path_factory.mktemp("json")
    for name, part in {"train-0": documents[:100], "train-1": documents[100:200], "eval": documents[200:]}.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return {"train": f"{path}/train-*.jsonl", "validation": f"{path}/eval.jsonl"}
