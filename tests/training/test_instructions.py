"""Masked prompts and packed rows."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

from training.finetune.instructions import IGNORED, encode, likeliest, pack, perplexity, prompt, response_metrics
from training.finetune.tiny import tiny_decoder, train_tokenizer

ROWS = [
    {"instruction": "Name a colour.", "input": "", "output": "Green."},
    {"instruction": "Add.", "input": "1 + 2", "output": "3"},
    {"instruction": "Spell the word.", "input": "grass", "output": "g r a s s"},
    {"instruction": "Repeat.", "input": "moss " * 20, "output": "moss " * 20},
    {"instruction": "Name a plant.", "input": None, "output": "Moss."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f"{row['instruction']} {row['input']} {row['output']}" for row in ROWS], 300)


def dataset(rows=ROWS):
    return DatasetDict(train=Dataset.from_list(rows))


def test_prompts_are_not_trained_on(tokenizer):
    for row, encoded in zip(ROWS, encode(dataset(), tokenizer, 500)["train"], strict=True):
        answer = [token for token in encoded["labels"] if token != IGNORED]
        assert tokenizer.decode(answer) == f"{row['output']}</s>"
        asked = encoded["input_ids"][: -len(answer)]
        assert tokenizer.decode(asked) == f"<s>{prompt(row['instruction'], row['input'] or '')}"
        assert encoded["labels"] == [IGNORED] * len(asked) + answer
        assert encoded["input_ids"] == asked + answer


def test_prompt_names_its_parts():
    assert prompt("Add.", "1 + 2") == "### Instruction\nAdd.\n\n### Input\n1 + 2\n\n### Response\n"
    assert prompt("Go.") == "### Instruction\nGo.\n\n### Response\n"


def test_long_examples_are_cut_and_those_without_a_response_dropped(tokenizer):
    lengths = [len(row["input_ids"]) for row in encode(dataset(), tokenizer, 500)["train"]]
    longest = max(lengths)
    cut = encode(dataset(), tokenizer, longest - 3)["train"]
    assert max(map(len, cut["input_ids"])) == longest - 3
    assert len(cut) == len(ROWS)
    few = encode(dataset(), tokenizer, min(lengths))["train"]
    assert 1 <= len(few) < len(ROWS)
    with pytest.raises(ValueError, match="fills max_length=4 tokens"):
        encode(dataset(), tokenizer, 4)


def test_packed_rows_hold_every_example_whole(tokenizer):
    encoded = encode(dataset(), tokenizer, 130)
    packed = pack(encoded, 130, tokenizer.pad_token_id)["train"]
    assert len(packed) < len(ROWS)
    found = []
    for row in packed:
        assert len(row["input_ids"]) == len(row["labels"]) == len(row["position_ids"]) == 130
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0] + [130]
        for start, end in itertools.pairwise(starts):
            assert row["position_ids"][start:end] == list(range(end - start))
            found.append({key: row[key][start:end] for key in ("input_ids", "labels")})
    examples = [item for item in found if item["input_ids"][0] != tokenizer.pad_token_id]
    assert examples == list(encoded["train"])
    for item in found:
        if item not in examples:
            assert set(item["labels"]) == {IGNORED}


@torch.no_grad()
def test_packed_examples_do_not_see_each_other(tokenizer):
    encoded = encode(dataset(), tokenizer, 130)
    model = tiny_decoder(tokenizer, max_length=130).eval()
    alone = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in encoded["train"]]
    packed = pack(encoded, 130, tokenizer.pad_token_id)["train"].with_format("torch")
    logits = model(input_ids=packed["input_ids"][:], position_ids=packed["position_ids"][:]).logits
    together = logits[packed["input_ids"][:] != tokenizer.pad_token_id]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_token_accuracy_counts_responses_alone():
    labels = np.array([[IGNORED, 5, 6, 7], [IGNORED, IGNORED, 8, IGNORED]])
    tokens = np.array([[5, 6, 0, 9], [1, 8, 1, 1]])  # at each place the prediction of the next
    assert response_metrics(SimpleNamespace(predictions=tokens, label_ids=labels)) == {"token_accuracy": 3 / 4}
    logits = torch.eye(4)[None]
    assert likeliest((logits, None), None).tolist() == likeliest(logits, None).tolist() == [[0, 1, 2, 3]]


def test_perplexity():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e4) == math.inf


def test_misuse(tokenizer):
    with pytest.raises(ValueError, match="needs the columns instruction and output"):
        encode(dataset([{"question": "?", "answer": "!"}]), tokenizer, 10)
    with pytest.raises(ValueError, match="no eos_token"):
        encode(dataset(), SimpleNamespace(eos_token_id=None), 10)
