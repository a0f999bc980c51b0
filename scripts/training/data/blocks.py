"""Batches of packed tokens from one of three sources; which one, :class:`DataConfig` says."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on. By default the embedded corpus: the installed Python standard library, as bytes.

    Attributes:
        batch_size: sequences per batch.
        seq_len: predicted tokens per sequence.
        seed: of the order of blocks (files only; a stream keeps its own order).
        shard: which of how many equal parts to read: a process's rank and the number of processes.
        eval_blocks: held-out sequences to evaluate on, at most.
        tokenizer: name or path for ``AutoTokenizer``; ``None`` means bytes.
        text_files: glob patterns of text files; 5% of the files are held out, unless there are ``eval_files``.
        eval_files: glob patterns of held-out text files.
        dataset: a dataset on the Hugging Face hub, or a format (``"json"``, ``"text"``, ...) with ``data_files``.
        subset: configuration of the dataset.
        split: training split.
        eval_split: evaluation split.
        data_files: files by split, for a format.
        text_column: the column that holds the text.
    """

    batch_size: int = 8
    seq_len: int = 256
    seed: int = 0
    shard: tuple[int, int] = (0, 1)
    eval_blocks: int = 64
    tokenizer: str | None = None
    text_files: Sequence[str] = ()
    eval_files: Sequence[str] = ()
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    eval_split: str = "validation"
    data_files: dict[str, str] | None = None
    text_column: str = "text"

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "eval_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"Invalid {name}={getattr(self, name)}: must be >= 1")
        if self.seed < 0:
            raise ValueError(f"Invalid seed={self.seed}: must be >= 0")
        if self.dataset and self.text_files:
            raise ValueError(f"Choose one of dataset={self.dataset!r} and text_files={self.text_files!r}")
        if self.dataset and not self.tokenizer:
            raise ValueError(f"dataset={self.dataset!r} needs a tokenizer")
        if self.eval_files and not self.text_files:
            raise ValueError(f"eval_files={self.eval_files!r} needs text_files")
        for name in ("subset", "split", "eval_split", "text_column"):
            if not self.dataset and getattr(self, name) != getattr(DataConfig, name):
                raise ValueError(f"{name}={getattr(self, name)!r} needs a dataset")
        if self.data_files and not self.dataset:
            raise ValueError(f"data_files={self.data_files!r} needs a dataset format, such as dataset='json'")


class Batches(Protocol):
    """An endless iterator over int64 ``(batch_size, seq_len + 1)`` batches whose position can be saved and restored."""

    seq_len: int

    @property
    def batch_size(self) -> int:
        """Sequences of this process in a batch."""

    def __next__(self) -> Tensor:
        """The next batch; inputs are ``[:, :-1]``, targets ``[:, 1:]``."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""


@dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        train: endless training batches.
        eval_blocks: held-out int64 ``(blocks, seq_len + 1)``.
        vocab_size: number of token ids.
    """

    train: Batches
    eval_blocks: Tensor
    vocab_size: int


class PackedBatches:
    """Batches of blocks cut from tokens in memory: which sequences follow each other is a pure function of the seed.

    Block ``i`` is ``tokens[i * seq_len : (i + 1) * seq_len + 1]``: each token is predicted once per epoch. Every epoch
    has its own permutation of the blocks, and batches run on across the border of two epochs. The processes take their
    sequences one after the other, process ``i`` the next ``sizes[i]`` of them. So after as many sequences any number of
    processes goes on with the same ones.

    Attributes:
        sizes: sequences of each process in a batch; at first ``batch_size`` for each.
        position: sequences that all processes have been served.

    Raises:
        ValueError: there is not one whole block.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self._tokens = tokens
        self.blocks = packed_blocks(tokens, seq_len)
        self.sizes = (batch_size,) * shard[1]
        self.seq_len = seq_len
        self.seed = seed
        self.rank = shard[0]
        self.position = 0

    @property
    def batch_size(self) -> int:
        """Sequences of this process in a batch."""
        return self.sizes[self.rank]

    def sequences(self, start: int, count: int) -> Tensor:
        """So many sequences from a place in the order of all epochs."""
        places = torch.arange(start, start + count)
        epochs, offsets = places // len(self.blocks), places % len(self.blocks)
        orders = {epoch: epoch_order(len(self.blocks), self.seed, epoch) for epoch in set(epochs.tolist())}
        chosen = [orders[epoch][offset] for epoch, offset in zip(epochs.tolist(), offsets.tolist(), strict=True)]
        return self.blocks[chosen].long()

    def __next__(self) -> Tensor:
        start = self.position + sum(self.sizes[: self.rank])
        self.position += sum(self.sizes)
        return self.sequences(start, self.batch_size)

    @cached_property
    def text(self) -> dict[str, int]:
        """What tells these blocks from those of other texts."""
        return {"blocks": len(self.blocks), "crc32": zlib.crc32(self._tokens.numpy().tobytes())}

    def state_dict(self) -> dict[str, Any]:
        """The number of sequences that all processes have been served, and of which text."""
        return {"position": self.position, **self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: it was saved with another text, of which the same position is another one.
        """
        saved = {key: state[key] for key in self.text if key in state}  # older checkpoints have none
        if saved and saved != self.text:
            raise ValueError(
                f"The training text has changed: the checkpoint was made with {saved}, not with {self.text}. Resume "
                "with the same files, or begin another run from the checkpoint's model"
            )
        self.position = state["position"]


@lru_cache(maxsize=2)
def epoch_order(blocks: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The permutation of the blocks in one epoch."""
    return tuple(np.random.default_rng((seed, epoch)).permutation(blocks).tolist())


def packed_blocks(tokens: Tensor, seq_len: int) -> Tensor:
    """A view of the tokens as overlapping blocks, ``(tokens,) -> ((tokens - 1) // seq_len, seq_len + 1)``.

    Raises:
        ValueError: there is not one whole block.
    """
    if len(tokens) <= seq_len:
        raise ValueError(f"{len(tokens)} tokens do not fill one block of {seq_len=} and a target")
    return tokens.unfold(0, seq_len + 1, seq_len)
