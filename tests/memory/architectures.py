"""Shapes that tests plan for."""

from transformers import (
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from grass.memory import Architecture
from grass.memory.llama import llama_config

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
    "use_cache": False,
}
KINDS = {
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SMALL, head_dim=64, attention_bias=True),
    "gpt2": GPT2Config(n_embd=256, n_layer=2, n_head=8, vocab_size=8000, bos_token_id=0, eos_token_id=0),
    "gemma": GemmaConfig(**SMALL, head_dim=32),
    "gemma2": Gemma2Config(**SMALL, head_dim=32),
    "phi": PhiConfig(**SMALL),
    "opt": OPTConfig(hidden_size=256, ffn_dim=1024, num_hidden_layers=2, num_attention_heads=8, vocab_size=8000),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL, head_dim=64, moe_intermediate_size=256, num_local_experts=8, num_experts_per_tok=2
    ),
    "gpt-neox": GPTNeoXConfig(**{**SMALL, "num_key_value_heads": None}),
}
CAPPED = "gemma2"
"""Of these, the one that caps its logits, so that its loss cannot be chunked."""


def llama(size: str, layers: int | None = None) -> PretrainedConfig:
    config = llama_config(size, vocab_size=32_000, max_seq_len=2048)
    config.num_hidden_layers = layers or config.num_hidden_layers
    return config


LLAMA_13B = Architecture.from_config(llama("13b"))
LLAMA_60M = Architecture.from_config(llama("60m"))
LLAMA_1B = Architecture.from_config(llama("1b"))
LLAMA_7B = Architecture.from_config(llama("7b"))
