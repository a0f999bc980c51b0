"""Decoder-only transformers by shape: what a plan has to know of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from grass.compact_mode.conversion import convertible
from grass.labels import changes_logits
from grass.memory.kinds import check_blocks, check_kind, learned_positions
from grass.memory.tracing import Tracer, blocks_of
from grass.targets import expert_weights, matched_modules


@dataclass(frozen=True)
class Linear:
    """The weight ``(m, n)`` of a linear layer that Grass converts, or of each of several experts.

    Attributes:
        m: output features.
        n: input features.
        experts: how many matrices there are.
        used: how many of them compute each token.
    """

    m: int
    n: int
    experts: int = 1
    used: int = 1

    @property
    def elements(self) -> int:
        """The number of elements of all experts."""
        return self.experts * self.m * self.n

    def size(self, dim: int) -> int:
        """Rows (``dim=0``) or columns of one matrix."""
        return (self.m, self.n)[dim]

    def width(self, dim: int) -> int:
        """Elements of one of them."""
        return (self.n, self.m)[dim]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A stack of like blocks between embedding and head.

    Attributes:
        layers: blocks, ``L``.
        vocab: tokens ``V``.
        block: the parameters of one block in order: the matrices that Grass converts (:func:`grass.matched_modules`),
            and the elements of each other one, biases and norms.
        other_used: elements of the other matrices of a block that a token is multiplied by, as of experts that Grass
            does not convert.
        outside: elements of each parameter outside the blocks, a tied weight once.
        head: elements of the head's weight, and of the embedding's.
        tied: whether the head's weight is the embedding's.
        window: of sliding attention; ``None`` attends to everything before.
        positions: the longest sequence for which positions are learned; ``None`` where they are computed.
        scales_logits: whether the model does more to its logits than its head.
        tracer: counts what a block saves.
    """

    layers: int
    vocab: int
    block: tuple[Linear | int, ...]
    other_used: int
    outside: tuple[int, ...]
    head: int
    tied: bool
    window: int | None
    positions: int | None
    scales_logits: bool
    tracer: Tracer = field(compare=False, repr=False)

    @classmethod
    def from_config(cls, config: Any) -> Architecture:
        """From a ``transformers`` configuration, by the model it makes, on the meta device.

        Raises:
            ValueError: it makes no causal language model of like blocks of linear layers and attention.
        """
        check_kind(config)
        model = _meta_model(config)
        blocks = blocks_of(model)
        check_blocks(config, blocks)
        inside = {id(p) for p in blocks.parameters()}
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        used = getattr(config, "num_experts_per_tok", None) or 1
        block = _parameters(blocks[0], used)
        return cls(
            layers=len(blocks),
            vocab=head.shape[0],
            block=block,
            other_used=_other_used(blocks[0], block, used),
            outside=tuple(p.numel() for p in model.parameters() if id(p) not in inside),
            head=head.numel(),
            tied=head is embedding,
            window=getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None,
            positions=learned_positions(model),
            scales_logits=changes_logits(config) is not None,
            tracer=Tracer(config),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices of one block that Grass converts."""
        return tuple(part for part in self.block if isinstance(part, Linear))

    def whole(self, *, linears: bool) -> tuple[int, ...]:
        """Elements of each parameter that is stepped whole: embedding, head, norms; with ``linears`` all of them."""
        block = [part.elements if isinstance(part, Linear) else part for part in self.block]
        vectors = [part for part in self.block if isinstance(part, int)]
        return *self.outside, *self.layers * (block if linears else vectors)

    @property
    def vectors(self) -> int:
        """Elements of one block's other parameters."""
        return sum(part for part in self.block if isinstance(part, int))

    @property
    def ends(self) -> int:
        """Elements of all that is outside the blocks."""
        return sum(self.outside)

    @property
    def layer_matrix(self) -> int:
        """Elements of the matrices of one block that Grass converts."""
        return sum(linear.elements for linear in self.linears)

    @property
    def flops_elements(self) -> int:
        """Elements of one block that a token is multiplied by."""
        return sum(linear.m * linear.n * linear.used for linear in self.linears) + self.other_used

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.layers * (self.layer_matrix + self.vectors) + self.ends


def _meta_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            model.tie_weights()
            return model
    except Exception as error:  # whatever a model's constructor raises where values do not go together
        raise ValueError(
            f"The configuration makes no {config.model_type} model: {type(error).__name__}: {error}"
        ) from error


def _parameters(block: nn.Module, used: int) -> tuple[Linear | int, ...]:
    """A block's parameters: the matrices that :func:`grass.compact` would convert, and the elements of the others."""
    layers: dict[str, Any] = {name: block.get_submodule(name) for name in matched_modules(block)}
    found = {}
    for name, layer in layers.items():
        if convertible(name, layer):
            m, n = layer.weight.shape[:: 1 if isinstance(layer, nn.Linear) else -1]
            found[id(layer.weight)] = Linear(m, n)
    for module in block.modules():
        for name, transposed in expert_weights(module).items():
            weight = module.get_parameter(name)
            m, n = weight.shape[:0:-1] if transposed else weight.shape[1:]
            found[id(weight)] = Linear(m, n, weight.shape[0], used)
    return tuple(found.get(id(p), p.numel()) for p in block.parameters())


def _other_used(block: nn.Module, parts: tuple[Linear | int, ...], used: int) -> int:
    """Elements that a token is multiplied by, of matrices that are not converted; of those of experts its share."""
    others = [p for p, part in zip(block.parameters(), parts, strict=True) if isinstance(part, int)]
    return sum(
        p.numel() // p.shape[0] * min(used, p.shape[0]) if p.ndim == 3 else p.numel() for p in others if p.ndim > 1
    )
