"""Cross-entropy of a language model that never holds the logits of all tokens."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from grass.labels import IGNORED, changes_logits, next_tokens

REFUSED = {"logits_to_keep": 0, "ignore_index": IGNORED, "return_dict": True}
"""Arguments of a forward with labels that would be ignored, and the values that change nothing."""
ROUTING = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
"""What a mixture knows of its routers."""


def chunked_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    chunk_tokens: int,
    num_items_in_batch: Tensor | float | None = None,
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
        num_items_in_batch: what the sum is divided by; ``None`` for the tokens that count.

    Returns:
        The mean over the tokens that count, or the quotient, float32; NaN if no token counts.
    """
    if chunk_tokens < 1:
        raise ValueError(f"Invalid {chunk_tokens=}: must be >= 1")
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    losses = [
        checkpoint(_summed_loss, h, t, head, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    ]
    items = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.stack(losses).sum() / (items.to(losses[0].device) if isinstance(items, Tensor) else items)


def chunk_loss(model: PreTrainedModel, chunk_tokens: int) -> None:
    """Have ``model(input_ids=..., labels=...)`` compute its loss by :func:`chunked_cross_entropy` from now on.

    The output has that loss and no logits; without labels nothing changes. As with transformers' own loss, labels are
    shifted by one unless ``shift_labels`` says what each position predicts, ``num_items_in_batch`` is what the sum over
    tokens is divided by, and with ``output_router_logits`` the balance of a mixture's routers is added. Call it before
    DDP or ``fully_shard``.

    Raises:
        ValueError: ``chunk_tokens`` is no positive integer, or the model does more to its logits than its head, or has
            a loss of its routers that is not transformers' ``load_balancing_loss_func``. A forward with labels and
            ``logits_to_keep``, ``ignore_index`` or ``return_dict=False`` raises it too.
    """
    if chunk_tokens < 1:
        raise ValueError(f"Invalid {chunk_tokens=}: must be >= 1")
    if (name := changes_logits(model.config)) is not None:
        raise ValueError(f"{type(model).__name__} changes its logits ({name}): its loss cannot be chunked")
    if _routes(model, {}):
        _balancing(model)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return type(self).forward(self, *args, **kwargs)
        if refused := [name for name, default in REFUSED.items() if kwargs.get(name, default) not in (None, default)]:
            raise ValueError(f"{', '.join(refused)} with labels: a loss that is chunked does not take it")
        targets, items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
        outputs = self.base_model(*args, **kwargs)
        loss = chunked_cross_entropy(
            outputs.last_hidden_state,
            next_tokens(labels) if targets is None else targets,
            self.get_output_embeddings(),
            chunk_tokens=chunk_tokens,
            num_items_in_batch=items,
        )
        if not _routes(self, kwargs):
            return CausalLMOutputWithPast(loss=loss)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        balance = _balancing(self)(outputs.router_logits, self.num_experts, self.num_experts_per_tok, mask)
        return MoeCausalLMOutputWithPast(loss=loss + self.router_aux_loss_coef * balance, aux_loss=balance)

    model.forward = MethodType(forward, model)


def _routes(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a model adds the balance of its routers to its loss."""
    asked = arguments.get("output_router_logits")
    return bool(getattr(model.config, "output_router_logits", False) if asked is None else asked)


def _balancing(model: Any) -> Callable[..., Tensor]:
    """What a mixture's own forward computes the balance of its routers with."""
    modules = [sys.modules.get(kind.__module__) for kind in type(model).__mro__]
    found = next(filter(None, (getattr(module, "load_balancing_loss_func", None) for module in modules)), None)
    if found is None or any(not hasattr(model, name) for name in ROUTING):
        raise ValueError(
            f"{type(model).__name__} has output_router_logits and not transformers' usual loss of its routers: its "
            "loss cannot be chunked"
        )
    balancing: Callable[..., Tensor] = found
    return balancing


def _summed_loss(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum", ignore_index=IGNORED)
