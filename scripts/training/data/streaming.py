"""Batches from a ``datasets`` dataset that is never held in memory, resumable to the token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from training.data.blocks import Data, DataConfig, packed_blocks
from training.data.tokenization import Tokenizer

if TYPE_CHECKING:
    from datasets import IterableDataset


class StreamedBatches:
    """Packs the documents of an ``IterableDataset``, in its order, into batches; starts over at its end.

    The saved position is the dataset's own ``state_dict`` and the tokens already read but not yet served, so a resumed
    stream goes on with the very next token. The dataset must not have a shuffle buffer, which its state lacks.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seq_len: int,
        text_column: str = "text",
    ) -> None:
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.text_column = text_column
        self.epoch = 0
        self._documents = iter(dataset)
        self._buffer = torch.empty(0, dtype=torch.int32)

    def __next__(self) -> Tensor:
        served = self.batch_size * self.seq_len
        wanted = served + 1 - len(self._buffer)
        if wanted > 0:
            self._buffer = torch.cat([self._buffer, _first_tokens(self.tokenizer, self._texts(), wanted)])
        batch = packed_blocks(self._buffer[: served + 1], self.seq_len).long()
        self._buffer = self._buffer[served:].clone()
        return batch

    def _texts(self) -> Iterator[str]:
        """The documents from here on, epoch after epoch."""
        passes_without_document = 0
        while passes_without_document < 2:
            passes_without_document += 1
            for document in self._documents:
                passes_without_document = 0
                yield document[self.text_column]
            self._start(self.epoch + 1)
        raise ValueError("The dataset has no documents")

    def _start(self, epoch: int) -> None:
        self.epoch = epoch
        self.dataset.set_epoch(epoch)
        self._documents = iter(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, the dataset's position and the unserved tokens."""
        return {"epoch": self.epoch, "dataset": self.dataset.state_dict(), "buffer": self._buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        self.dataset.load_state_dict(state["dataset"])
        self._buffer = state["buffer"]
        self._start(state["epoch"])


def stream_data(config: DataConfig, tokenizer: Tokenizer) -> Data:
    """Open the training split of ``config.dataset`` as a stream and read the first evaluation blocks."""
    from datasets.distributed import split_dataset_by_node

    rank, size = config.shard
    train = StreamedBatches(
        split_dataset_by_node(_open(config, config.split), rank, size),
        tokenizer,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        text_column=config.text_column,
    )
    texts = (document[config.text_column] for document in _open(config, config.eval_split))
    eval_tokens = _first_tokens(tokenizer, texts, config.eval_blocks * config.seq_len + 1)
    eval_blocks = packed_blocks(eval_tokens, config.seq_len)[: config.eval_blocks]
    return Data(train, eval_blocks.long(), tokenizer.vocab_size)


def _open(config: DataConfig, split: str) -> IterableDataset:
    from datasets import load_dataset

    return load_dataset(config.dataset, config.subset, split=split, data_files=config.data_files, streaming=True)


def _first_tokens(tokenizer: Tokenizer, texts: Iterable[str], count: int) -> Tensor:
    """Tokens of as many documents as it takes to have ``count``."""
    pieces: list[Tensor] = []
    available = 0
    for text in texts:
        pieces.append(tokenizer.encode(text))
        available += len(pieces[-1])
        if available >= count:
            break
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32)
