"""Cross-entropy of a language model that never holds the logits of all tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from grass.labels import IGNORED, changes_logits, next_tokens


def chunked_cross_entropy(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], *, chunk_tokens: int
) -> Tensor:
    """``F.cross_entropy(head(hidden).float(), targets)``, computed and differentiated chunk by chunk.

    Backward computes each chunk's logits once more (``torch.utils.checkpoint``), so that those of ``chunk_tokens``
    tokens are all that exists at a time: ``chunk_tokens V`` elements instead of ``T V``, for one more product with the
    head. Gradients of the head's weight add up over the chunks in its own dtype, as over micro-batches.

    Args:
        hidden: ``(..., h)``.
        targets: int64 ``(...)``, token ids or :data:`IGNORED`.
        head: ``(t, h) -> (t, V)``.
        chunk_tokens: tokens per chunk, >= 1.

    Returns:
        The mean over the tokens that count, float32; NaN if none does.
    """
    if chunk_tokens < 1:
        raise ValueError(f"Invalid {chunk_tokens=}: must be >= 1")
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    losses = [
        checkpoint(_summed_loss, h, t, head, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    ]
    return torch.stack(losses).sum() / (targets != IGNORED).sum()


def chunk_loss(model: PreTrainedModel, chunk_tokens: int) -> None:
    """Have ``model(input_ids=..., labels=...)`` compute its loss by :func:`chunked_cross_entropy` from now on.

    The output has that loss and no logits; without labels nothing changes. As with transformers' own loss, labels are
    shifted by one unless ``shift_labels`` says what each position predicts. Call it before DDP or ``fully_shard``.

    Raises:
        ValueError: ``chunk_tokens`` is no positive integer, or the model does more to its logits than its head.
    """
    if chunk_tokens < 1:
        raise ValueError(f"Invalid {chunk_tokens=}: must be >= 1")
    if (name := changes_logits(model.config)) is not None:
        raise ValueError(f"{type(model).__name__} changes its logits ({name}): its loss cannot be chunked")

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return type(self).forward(self, *args, **kwargs)
        targets = kwargs.pop("shift_labels", None)
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        if targets is None:
            targets = next_tokens(labels)
        return CausalLMOutputWithPast(
            loss=chunked_cross_entropy(hidden, targets, self.get_output_embeddings(), chunk_tokens=chunk_tokens)
        )

    model.forward = MethodType(forward, model)


def _summed_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum", ignore_index=IGNORED)
