"""LLaMA sizes of the GaLore and Grass papers, and mixtures of experts; importing this module imports transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of a LLaMA, without its vocabulary."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None


@dataclass(frozen=True)
class MixtureShape(LlamaShape):
    """Dimensions of a mixture of experts with LLaMA's blocks (Qwen3-MoE); ``intermediate_size`` is an expert's."""

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    head_dim: int = 64


LLAMA_SHAPES = {
    "1m": LlamaShape(128, 352, 4, 4),  # the body of 9m; 0.87 million parameters with a byte vocabulary
    "9m": LlamaShape(128, 352, 4, 4),
    "9m-wide": LlamaShape(320, 864, 7, 5),  # as many parameters, in the body: 8.8 million with a byte vocabulary
    "28m-wide": LlamaShape(768, 2048, 4, 12),  # 1m at the width of 130m: 28.7 million with a byte vocabulary
    "200m-wide": LlamaShape(2048, 5461, 4, 32),  # at the width of 1b: 202 million with a byte vocabulary
    "800m-wide": LlamaShape(4096, 11008, 4, 32),  # at the width of 7b: 812 million with a byte vocabulary
    "60m": LlamaShape(512, 1376, 8, 8),
    "130m": LlamaShape(768, 2048, 12, 12),
    "350m": LlamaShape(1024, 2736, 24, 16),
    "1b": LlamaShape(2048, 5461, 24, 32),
    "7b": LlamaShape(4096, 11008, 32, 32),
    "13b": LlamaShape(5120, 13824, 40, 40),
    "30b": LlamaShape(6656, 17920, 60, 52),
    "70b": LlamaShape(8192, 28672, 80, 64, 8),
    "9m-mixture": MixtureShape(192, 288, 6, 3, 3),  # 9.0 million with a byte vocabulary, 3.0 of them for each token
    "30b-a3b": MixtureShape(2048, 768, 48, 32, 4, 128, 8, 128),  # Qwen3-30B-A3B
}
"""Shapes by name. A name says how many parameters there are with a vocabulary of 32,000 tokens. The names ``1m``,
``9m-wide``, ``28m-wide``, ``200m-wide``, ``800m-wide`` and ``9m-mixture`` are for a vocabulary of bytes."""


def llama_config(shape: str | LlamaShape, *, vocab_size: int, max_seq_len: int) -> PretrainedConfig:
    """The ``transformers`` configuration of one of :data:`LLAMA_SHAPES`, by name, or of another shape.

    Embeddings are untied as in the papers.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(shape, str):
        if shape not in LLAMA_SHAPES:
            raise ValueError(f"Unknown model {shape!r}; available: {', '.join(LLAMA_SHAPES)}")
        shape = LLAMA_SHAPES[shape]
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_position_embeddings": max_seq_len,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if isinstance(shape, MixtureShape):  # the loss has the routers' balance in it
        sizes = {**vars(shape), "moe_intermediate_size": shape.intermediate_size}
        return Qwen3MoeConfig(**sizes, **common, norm_topk_prob=True, output_router_logits=True)
    return LlamaConfig(**vars(shape), **common)
