"""Training data from the source that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from training.data.blocks import Data, DataConfig, PackedBatches, packed_blocks
from training.data.corpus import Document, split_by_file, standard_library, text_files
from training.data.streaming import stream_data
from training.data.tokenization import Tokenizer, encode_all, load_tokenizer


def load_data(config: DataConfig) -> Data:
    """Open the source that the configuration names."""
    tokenizer = load_tokenizer(config.tokenizer)
    if config.dataset is not None:
        return stream_data(config, tokenizer)
    if config.eval_files:
        return _packed_data(text_files(config.text_files), text_files(config.eval_files), tokenizer, config)
    documents = text_files(config.text_files) if config.text_files else standard_library()
    return _packed_data(*split_by_file(documents), tokenizer, config)


def _packed_data(
    train: Sequence[Document], held_out: Sequence[Document], tokenizer: Tokenizer, config: DataConfig
) -> Data:
    tokens = encode_all(tokenizer, (document.text for document in train))
    batches = PackedBatches(
        tokens,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        seed=config.seed,
        shard=config.shard,
    )
    eval_tokens = encode_all(tokenizer, (document.text for document in held_out))
    eval_blocks = packed_blocks(eval_tokens, config.seq_len)
    count = min(config.eval_blocks, len(eval_blocks))
    evenly = torch.linspace(0, len(eval_blocks) - 1, count, dtype=torch.float32).long()
    return Data(batches, eval_blocks[evenly].long(), tokenizer.vocab_size)
