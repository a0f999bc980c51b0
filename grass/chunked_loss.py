"""Cross-entropy of a language model that never holds the logits of all tokens."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from grass.labels import IGNORED, changes_logits, next_tokens
from grass.private_names import FakeTensor

REFUSED = {
    "logits_to_keep": 0,
    "ignore_index": IGNORED,
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
}
"""Arguments of a forward with labels that would be ignored, and the values that change nothing."""
COMPARED = 16
"""Tokens whose loss is compared with the model's own."""
NOT_COMPARED = ("attention_mask", "position_ids", "shift_labels")
"""Arguments that belong to the tokens of the whole batch: a few of them may all be masked."""
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
    draws = not isinstance(head, nn.Linear)  # as adapters with dropout do
    losses = [
        checkpoint(_summed_loss, h, t, head, use_reentrant=False, preserve_rng_state=draws)
        for h, t in zip(torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    ]
    items = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.stack(losses).sum() / (items.to(losses[0].device) if isinstance(items, Tensor) else items)


def chunk_loss(model: PreTrainedModel, chunk_tokens: int) -> None:
    """Have ``model(input_ids=..., labels=...)`` compute its loss by :func:`chunked_cross_entropy` from now on.

    The output has that loss and no logits; without labels nothing changes. As with transformers' ``ForCausalLMLoss``,
    labels are shifted by one unless ``shift_labels`` says what each position predicts, ``num_items_in_batch`` is what
    the sum over tokens is divided by, and with ``output_router_logits`` the balance of a mixture's routers is added.
    The first forward with labels compares this loss of a few tokens with the model's own. Call it before DDP or
    ``fully_shard``.

    Raises:
        TypeError: the model is none of transformers, as PEFT's wrapper: take its ``get_base_model()``.
        ValueError: ``chunk_tokens`` is no positive integer, or the model has no head, has an encoder, does more to its
            logits than its head, or has a loss of its routers that is not transformers' ``load_balancing_loss_func``.
            The first forward with labels: the model's own loss is another. Any: labels come with ``logits_to_keep``,
            ``ignore_index``, ``return_dict=False`` or what else would be ignored.
    """
    if chunk_tokens < 1:
        raise ValueError(f"Invalid {chunk_tokens=}: must be >= 1")
    if not isinstance(model, PreTrainedModel):
        given = type(model).__name__  # type: ignore[unreachable]
        raise TypeError(f"chunk_loss() takes a model of transformers, got {given}; of PEFT's take get_base_model()")
    _check_model(model)
    own = type(model).forward
    names, checked = list(inspect.signature(own).parameters)[1:], False

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        labels = kwargs.pop("labels", None)
        if labels is None:
            return type(self).forward(self, **kwargs)
        if refused := [name for name, default in REFUSED.items() if kwargs.get(name, default) not in (None, default)]:
            raise ValueError(f"{', '.join(refused)} with labels: a loss that is chunked does not take it")
        if not checked and _can_compare(self):
            _compare(self, labels, kwargs)
            checked = True
        return _forward(self, labels, kwargs, chunk_tokens)

    model.forward = MethodType(forward, model)


def _forward(model: Any, labels: Tensor, arguments: dict[str, Any], chunk_tokens: int) -> Any:
    """The output of a model's forward with a chunked loss."""
    targets, items = arguments.pop("shift_labels", None), arguments.pop("num_items_in_batch", None)
    outputs = model.base_model(**arguments)
    loss = chunked_cross_entropy(
        outputs.last_hidden_state,
        next_tokens(labels) if targets is None else targets,
        model.get_output_embeddings(),
        chunk_tokens=chunk_tokens,
        num_items_in_batch=items,
    )
    if not _routes(model, arguments):
        return CausalLMOutputWithPast(loss=loss)
    mask = arguments.get("attention_mask")
    balance = _balancing(model)(outputs.router_logits, model.num_experts, model.num_experts_per_tok, mask)
    return MoeCausalLMOutputWithPast(loss=loss + model.router_aux_loss_coef * balance, aux_loss=balance)


def _check_model(model: Any) -> None:
    """Refuse models whose loss is not that of a head."""
    kind = type(model).__name__
    if model.get_output_embeddings() is None or model.config.is_encoder_decoder:
        raise ValueError(f"{kind} is no decoder with a head: its loss cannot be chunked")
    if (name := changes_logits(model.config)) is not None:
        raise ValueError(f"{kind} changes its logits ({name}): its loss cannot be chunked")
    if _routes(model, {}):
        _balancing(model)


def _can_compare(model: Any) -> bool:
    """Whether losses are numbers here: not while a compiler traces, and not of fake tensors."""
    weight = next(model.parameters())
    return not (torch.compiler.is_compiling() or weight.is_meta or isinstance(weight, FakeTensor))


@torch.no_grad()
def _compare(model: Any, labels: Tensor, arguments: dict[str, Any]) -> None:
    """Compare the chunked loss of the first row's first tokens with that of the model's own forward.

    Both draw the same random numbers, which the next forward draws again.

    Raises:
        ValueError: they differ.
    """
    few: dict[str, Any] = {key: value for key, value in arguments.items() if value is None or isinstance(value, bool)}
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.shape[:2] == labels.shape and key not in NOT_COMPARED:
            few[key] = value[:1, :COMPARED]
    some = torch.arange(min(COMPARED, labels.shape[1]), device=labels.device)[None] % 2  # in every vocabulary
    what = f"{type(model).__name__} computes another loss than the cross-entropy of its head's logits"
    try:
        with _same_draws(model, labels.device):
            own = float(type(model).forward(model, **few, labels=some).loss)
        with _same_draws(model, labels.device):
            chunked = float(_forward(model, some, few, COMPARED).loss)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        raise ValueError(f"{what}, or none of a few tokens: it cannot be chunked ({error})") from error
    exact = next(model.parameters()).dtype.itemsize >= 4 and not torch.is_autocast_enabled(labels.device.type)
    tolerance = 1e-3 if exact and labels.device.type == "cpu" else 5e-3  # of matrices multiplied in other shapes
    if not math.isclose(own, chunked, rel_tol=tolerance, abs_tol=tolerance) and not (
        math.isnan(own) and math.isnan(chunked)
    ):
        raise ValueError(f"{what}: {own:.6g} of a few tokens, not {chunked:.6g}. It cannot be chunked")


def _same_draws(model: Any, *devices: torch.device) -> AbstractContextManager[None]:
    """A context that leaves the random generators of the model's devices as they were."""
    others = {device for device in (*devices, *(p.device for p in model.parameters())) if device.type != "cpu"}
    kind = next(iter(others)).type if others else "cuda"
    return torch.random.fork_rng(list(others), device_type=kind)


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
