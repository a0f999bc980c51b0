"""Text to token ids: raw bytes, or any Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Tokenizer(Protocol):
    """Turns documents into token ids, each document followed by an end-of-document token."""

    vocab_size: int

    def encode(self, text: str) -> Tensor:
        """Token ids of one document, the end-of-document token included: int32 ``(tokens,)``."""


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and 256 as end of document."""

    vocab_size = 257

    def encode(self, text: str) -> Tensor:
        """Bytes of ``text`` and the end-of-document token."""
        content = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
        return torch.from_numpy(np.append(content.astype(np.int32), np.int32(256)))


class PretrainedTokenizer:
    """A tokenizer from the Hugging Face hub or a local directory; its ``eos_token`` ends each document.

    Raises:
        ValueError: the tokenizer has no ``eos_token``.
    """

    def __init__(self, name_or_path: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"Tokenizer {name_or_path!r} has no eos_token to end documents with")
        self.vocab_size = len(self.tokenizer)

    def encode(self, text: str) -> Tensor:
        """Token ids of ``text`` and the ``eos_token``."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([*ids, self.tokenizer.eos_token_id], dtype=torch.int32)


def load_tokenizer(name_or_path: str | None) -> Tokenizer:
    """The named pretrained tokenizer; bytes for ``None``."""
    return ByteTokenizer() if name_or_path is None else PretrainedTokenizer(name_or_path)


def encode_all(tokenizer: Tokenizer, texts: Iterable[str]) -> Tensor:
    """All documents one after another: int32 ``(tokens,)``."""
    return torch.cat([tokenizer.encode(text) for text in texts])
