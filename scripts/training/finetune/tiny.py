"""A tokenizer and small models made on the spot, where there is no network or no time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from grass.memory.llama import llama_config
from training.run.models import build_llama

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
"""RoBERTa's first four, in its order."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``texts``, which frames what it encodes in ``<s>`` and ``</s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", ends)
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True))
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)  # type: ignore[no-untyped-call]
    return wrapped


def tiny_encoder(
    tokenizer: PreTrainedTokenizerBase, num_labels: int, *, max_length: int, seed: int = 0
) -> PreTrainedModel:
    """A RoBERTa for sequence classification with 64 hidden units in 2 layers; random weights, the same for one seed."""
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_length + 2,  # RoBERTa counts positions from behind its padding id, 1
        initializer_range=0.1,  # about 1 / sqrt(64): RoBERTa's 0.02 suits a width of 768, and hardly trains here
        type_vocab_size=1,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.num_labels = num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    return model


def tiny_decoder(tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int = 0) -> PreTrainedModel:
    """A LLaMA of the ``1m`` shape of :data:`grass.memory.llama.LLAMA_SHAPES`."""
    config = llama_config("1m", vocab_size=len(tokenizer), max_seq_len=max_length)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return build_llama(config, seed=seed)
