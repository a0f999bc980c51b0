"""LLaMA models of the GaLore and Grass papers, from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from grass.training.blockwise import Convert, build_blockwise
from grass.training.chunked_loss import chunk_loss


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of a LLaMA, without its vocabulary."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int


LLAMA_SHAPES = {
    "1m": LlamaShape(128, 352, 4, 4),  # the body of 9m; 0.87 million parameters with a byte vocabulary
    "9m": LlamaShape(128, 352, 4, 4),
    "9m-wide": LlamaShape(320, 864, 7, 5),  # as many parameters, in the body: 8.8 million with a byte vocabulary
    "60m": LlamaShape(512, 1376, 8, 8),
    "130m": LlamaShape(768, 2048, 12, 12),
    "350m": LlamaShape(1024, 2736, 24, 16),
    "1b": LlamaShape(2048, 5461, 24, 32),
    "7b": LlamaShape(4096, 11008, 32, 32),
    "13b": LlamaShape(5120, 13824, 40, 40),
}
"""Shapes by name; the names count a vocabulary of 32,000 tokens, but for ``1m`` and ``9m-wide``."""


def llama_config(shape: str | LlamaShape, *, vocab_size: int, max_seq_len: int) -> LlamaConfig:
    """The ``transformers`` configuration of one of :data:`LLAMA_SHAPES`, by name, or of another shape.

    Embeddings are untied as in the papers.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(shape, str):
        if shape not in LLAMA_SHAPES:
            raise ValueError(f"Unknown model {shape!r}; available: {', '.join(LLAMA_SHAPES)}")
        shape = LLAMA_SHAPES[shape]
    return LlamaConfig(
        **vars(shape),
        vocab_size=vocab_size,
        max_position_embeddings=max_seq_len,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def build_llama(
    config: LlamaConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    checkpointing: bool = False,
    chunk_tokens: int = 0,
    convert: Convert | None = None,
) -> PreTrainedModel:
    """A ``LlamaForCausalLM`` with random weights, made on ``device`` in ``dtype``: no second copy exists at any time.

    The same seed gives the same weights on devices of one type; global generators stay as they are.

    Args:
        config: sizes.
        seed: of the weights.
        dtype: of the weights.
        device: where they are made.
        checkpointing: keep only the inputs of decoder layers for backward, which runs each layer's forward again.
        chunk_tokens: tokens whose logits the loss holds at a time (:mod:`grass.training.chunked_loss`); 0 for all.
        convert: what to do with each decoder layer before the next one is made (:mod:`grass.training.blockwise`).
    """
    device = torch.device(device)
    with seeded(seed, device), device:
        if convert is None:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        else:
            model = build_blockwise(config, convert, dtype)
    if checkpointing:
        enable_checkpointing(model)
    if chunk_tokens:
        chunk_loss(model, chunk_tokens)
    return model


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from a seed, on the CPU and on ``device``, with the generators as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Activation checkpointing of every decoder layer, by transformers, in the variant that torch recommends."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
