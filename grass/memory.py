"""Memory in bytes: what an optimizer holds, and what training a LLaMA in compact mode takes, in closed form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grass.moments import HOST_KEYS


class StateBytes(NamedTuple):
    """Bytes of optimizer state.

    Attributes:
        device: beside the weights. Per projected weight under :class:`grass.GrassAdamW` that is ``2rn`` moments and
            ``r`` int64 indices; ``keep`` and ``bank`` add ``r`` float32 step counts, drawing with replacement ``r``
            float32 scales.
        host: in host memory, the moments bank.
    """

    device: int
    host: int


def state_bytes(optimizer: torch.optim.Optimizer) -> StateBytes:
    """Bytes of all tensors in the state of any optimizer, also those inside containers, plain objects and subclasses.

    A tensor subclass that says what it is made of, as torchao's quantised states do, counts as its parts.
    """
    device = host = 0
    for state in optimizer.state.values():
        for key, value in state.items():
            size = sum(t.numel() * t.element_size() for t in _tensors(value))
            if key in HOST_KEYS:
                host += size
            else:
                device += size
    return StateBytes(device, host)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        return [value] if flatten is None else [t for name in flatten()[0] for t in _tensors(getattr(value, name))]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return _tensors(vars(value)) if hasattr(value, "__dict__") else []


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one compact-mode training step, by category; ``print`` it for a table.

    Attributes:
        weights: frozen and dense parameters, in the model's dtype.
        active_rows: the selected rows, in theirs.
        gradients: of active rows and dense parameters, held from backward to ``zero_grad``.
        state: moments, row indices and step counts.
        activations: what forward saves for backward, without checkpointing.
        loss: the two float32 copies of the logits that backward through the loss needs at its start.
    """

    weights: int
    active_rows: int
    gradients: int
    state: int
    activations: int
    loss: int

    @property
    def peak(self) -> int:
        """The larger of the two high-water marks: entering backward, and stepping."""
        return self.weights + self.active_rows + self.state + max(self.activations + self.loss, self.gradients)

    def __str__(self) -> str:
        rows = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self)] + [("peak", self.peak)]
        return "\n".join(f"{name:<12} {size / 2**20:>12,.1f} MiB" for name, size in rows)


def estimate_llama(
    config: Any,
    *,
    rank: int,
    dim: int = 1,
    batch_size: int = 1,
    seq_len: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    active_dtype: torch.dtype = torch.float32,
) -> MemoryEstimate:
    """Memory of one training step of a LLaMA converted by ``grass.compact(model, rank=rank, dim=dim)``.

    For ``transformers``' ``LlamaForCausalLM`` with untied embeddings, scaled-dot-product attention without a mask, no
    checkpointing, and :class:`grass.GrassAdamW` with ``state_policy="reset"`` between two refreshes. With ``T`` tokens
    in the batch, hidden size ``h``, intermediate size ``f``, ``L`` layers, ``e`` bytes per element, forward saves

    - for each of the ``2L + 1`` norms ``T h (4 + e) + 4 T``;
    - for attention, per layer, queries, keys, values and output: ``4 T h e`` and ``4 T`` per head;
    - for the MLP, per layer, gate, its activation, and up: ``3 T f e``;
    - for the seven linear layers, per layer, ``7 T r e`` with ``dim=1``; with ``dim=0`` the inputs, ``T (2h + f) e``
      beyond what attention has saved;
    - for head and loss ``T h e + 4 T V``, for rotary embeddings and tokens ``2 T d e / B + 24 T``.

    Args:
        config: a ``LlamaConfig``.
        rank: rows or columns per weight.
        dim: 0 or 1.
        batch_size: sequences per step, ``B``.
        seq_len: tokens per sequence.
        dtype: of the model.
        active_dtype: of the active rows.
    """
    h, f, layers, vocab = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    kv = h * config.num_key_value_heads // config.num_attention_heads
    shapes = [(h, h), (kv, h), (kv, h), (h, h), (f, h), (f, h), (h, f)]  # (out features, in features)
    rows = layers * sum(rank * shape[1 - dim] for shape in shapes)
    linear, dense = layers * sum(m * n for m, n in shapes), 2 * vocab * h + (2 * layers + 1) * h
    e, active_e, moment_e = (
        dtype.itemsize,
        active_dtype.itemsize,
        torch.promote_types(active_dtype, torch.float32).itemsize,
    )
    tokens = batch_size * seq_len
    norms = (2 * layers + 1) * tokens * (h * (4 + e) + 4)
    attention = layers * tokens * (2 * (h + kv) * e + 4 * config.num_attention_heads)
    inputs = layers * tokens * e * (7 * rank if dim == 1 else 2 * h + f)
    mlp = layers * tokens * 3 * f * e
    rotary = 2 * seq_len * (h // config.num_attention_heads) * e
    head = tokens * (h * e + 4 * vocab + 24)
    return MemoryEstimate(
        weights=(linear + dense) * e,
        active_rows=rows * active_e,
        gradients=rows * active_e + dense * e,
        state=2 * rows * moment_e + 8 * rank * 7 * layers + 2 * dense * e + 4 * (2 * layers + 3),
        activations=norms + attention + inputs + mlp + rotary + head,
        loss=2 * tokens * 4 * vocab,
    )
