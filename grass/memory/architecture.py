"""Decoder-only transformers by shape: what a plan has to know of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the configurations that :meth:`Architecture.from_config` takes."""


@dataclass(frozen=True)
class Linear:
    """A linear layer's weight ``(m, n)``: ``m`` output features, ``n`` input features.

    Attributes:
        m: output features.
        n: input features.
        bias: whether it has one.
        shares_input: whether it reads the same tensor as a layer before it, or one that attention saves anyway.
    """

    m: int
    n: int
    bias: bool
    shares_input: bool


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A stack of decoder layers with rotary attention, gated MLP and RMS norms, between embedding and head.

    Attributes:
        hidden: width ``h``.
        intermediate: of the MLP, ``f``.
        layers: ``L``.
        heads: query heads.
        kv_heads: key and value heads; fewer than ``heads`` in grouped-query attention.
        head_dim: numbers per head.
        vocab: tokens ``V``.
        tied: whether the head's weight is the embedding's.
        qkv_bias: biases of the query, key and value projections.
        output_bias: of attention's output projection.
        mlp_bias: of the three MLP projections.
        qk_norm: RMS norms of queries and keys, per head.
        window: of sliding attention; ``None`` attends to everything before.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    @classmethod
    def from_config(cls, config: Any) -> Architecture:
        """From a ``transformers`` configuration.

        Raises:
            ValueError: another kind of model than :data:`SUPPORTED`.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        if kind not in SUPPORTED:
            raise ValueError(f"No plan for model_type={kind!r}: its layers are unknown; must be one of {SUPPORTED}")
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=attention_bias or kind == "qwen2",
            output_bias=attention_bias and kind != "qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
            window=getattr(config, "sliding_window", None),
        )

    @property
    def query_width(self) -> int:
        """Numbers per token in all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers per token in all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of one decoder layer."""
        h, f, q, kv = self.hidden, self.intermediate, self.query_width, self.kv_width
        return (
            Linear(q, h, self.qkv_bias, shares_input=False),
            Linear(kv, h, self.qkv_bias, shares_input=True),
            Linear(kv, h, self.qkv_bias, shares_input=True),
            Linear(h, q, self.output_bias, shares_input=True),
            Linear(f, h, self.mlp_bias, shares_input=False),
            Linear(f, h, self.mlp_bias, shares_input=True),
            Linear(h, f, self.mlp_bias, shares_input=False),
        )

    @property
    def vectors(self) -> int:
        """Elements of biases and norms in one decoder layer."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return norms + sum(linear.m for linear in self.linears if linear.bias)

    @property
    def layer_matrix(self) -> int:
        """Elements of the weights of one decoder layer's linear layers."""
        return sum(linear.m * linear.n for linear in self.linears)

    @property
    def embedding(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def ends(self) -> int:
        """Elements of embedding, head (unless tied) and last norm."""
        return (1 if self.tied else 2) * self.embedding + self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.layers * (self.layer_matrix + self.vectors) + self.ends
