"""Tiny Hugging Face models of several architectures, streamed or resident and checkpointed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW

transformers = pytest.importorskip("transformers")

VOCABULARY = 64

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
OPT: dict[str, Any] = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "tied llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "opt": ("OPTForCausalLM", "OPTConfig", {**OPT, "word_embed_proj_dim": 32}),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    "megatron": ("MegatronBertForCausalLM", "MegatronBertConfig", {**BERT, "is_decoder": True}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**BERT, "embedding_size": 32}),
}
GENERATING = ["llama", "tied llama", "gpt2", "opt", "t5"]


def network(architecture: str) -> Any:
    """A model with dropout where the architecture has it; equal ones for equal names."""
    model, config, options = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCABULARY, **options))
    return built.train()


def build(architecture: str, *, streamed: bool, checkpointed: bool | None = None, **stream: Any) -> tuple[Any, Any]:
    """A model in compact mode and its optimizer. A resident one is checkpointed, unless told otherwise."""
    model = network(architecture)
    grass.compact(model, rank=4)
    wanted = not streamed if checkpointed is None else checkpointed
    if wanted and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = GrassAdamW(model, lr=1e-2, offload="cpu" if streamed else None, update_interval=3)
    if streamed:
        model.handle = grass.stream(model, device="cpu", **stream)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0, **options: Any) -> list[float]:
    """The losses of an ordinary loop; returns right after the last step."""
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        ids = torch.randint(3, VOCABULARY, (2, 12))
        loss = model(input_ids=ids, labels=ids, **options).loss
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def quick_and_slow(*others: str) -> list[Any]:
    """Llama, and others whose tests are marked ``slow``."""
    return ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in others)]
