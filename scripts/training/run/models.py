"""LLaMA models of the GaLore and Grass papers, from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grass.chunked_loss import chunk_loss
from training.run.blockwise import Convert, build_blockwise


def build_llama(
    config: PretrainedConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    checkpointing: bool = False,
    chunk_tokens: int = 0,
    convert: Convert | None = None,
) -> PreTrainedModel:
    """A ``LlamaForCausalLM`` with random weights, made on ``device`` in ``dtype``: no second copy exists at any time.

    The same seed gives the same weights on devices of one type, with ``convert`` other ones than without; global
    generators stay as they are.

    Args:
        config: sizes.
        seed: of the weights.
        dtype: of the weights.
        device: where they are made.
        checkpointing: keep only the inputs of decoder layers for backward, which runs each layer's forward again.
        chunk_tokens: tokens whose logits the loss holds at a time (:mod:`grass.chunked_loss`); 0 for all.
        convert: what to do with each decoder layer before the next one is made (:mod:`training.run.blockwise`).
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
