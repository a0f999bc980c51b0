"""Calls of a model on a grid: each row of ranks gets its part of the batch, every rank the whole batch's results."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grass.distributed.parallel_2d.loss import cross_entropy
from grass.distributed.parallel_2d.mesh import Grid, WholeLogits
from grass.labels import next_tokens
from grass.parallel.ranks import checksum

OF_BATCH = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")
"""Arguments of a model's forward whose first dimension is the batch."""
REFUSED = ("output_hidden_states", "output_attentions", "inputs_embeds", "ignore_index")
"""Arguments that a grid has no whole answer to."""


def forward_on(grid: Grid, model: Any, chunk_tokens: int) -> Any:
    """The forward of a model whose layers are spread over a grid."""
    plain, agreed = type(model).forward, False

    @functools.wraps(plain)
    def forward(self: Any, input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        nonlocal agreed
        tokens = _checked(self, input_ids, args, kwargs)
        if not agreed:  # once: the ranks of a grid have one batch
            grid.peers.verify_settings({"input_ids": [*tokens.shape, checksum(tokens)]})
            agreed = True
        batch, training = tokens.shape[0], kwargs.get("labels") is not None
        if training and batch % grid.rows:
            raise ValueError(f"A batch of {batch} cannot be divided among {grid.rows} rows of ranks")
        own = {name: _own_part(value, name, batch, grid) for name, value in {"input_ids": tokens, **kwargs}.items()}
        if training:
            return _loss(self, grid, chunk_tokens, **own)
        output = plain(self, **own)
        output.logits = WholeLogits.apply(output.logits, grid)[:batch]  # type: ignore[no-untyped-call]
        return output

    return torch.compiler.disable(forward, reason="a grid's messages")  # type: ignore[no-untyped-call]


def _checked(model: Any, input_ids: Tensor | None, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """The token ids of a call that a grid can compute.

    Raises:
        TypeError: arguments by position.
        ValueError: arguments that are not for a grid, or another loss than transformers' own.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    if args:
        raise TypeError("A model on a grid takes input_ids and keyword arguments")
    given = [name for name in REFUSED if kwargs.get(name) is not None and kwargs[name] is not False]
    if given or kwargs.get("return_dict") is False or input_ids is None:
        raise ValueError(f"A model on a grid takes input_ids, and neither {', '.join(REFUSED)} nor return_dict=False")
    labels = kwargs.get("labels")
    if labels is None:
        return input_ids
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError("A grid computes transformers' ForCausalLMLoss: for another, call without labels, use logits")
    if labels.shape != input_ids.shape:
        raise ValueError(f"labels of shape {tuple(labels.shape)} for input_ids of shape {tuple(input_ids.shape)}")
    return input_ids


def _own_part(value: Any, name: str, batch: int, grid: Grid) -> Any:
    """The part of an argument that belongs to this row of ranks. A batch that does not divide is filled up."""
    if name not in OF_BATCH or not isinstance(value, Tensor) or value.shape[0] != batch:
        return value
    each = -(-batch // grid.rows)
    if missing := each * grid.rows - batch:
        value = torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
    return value.narrow(0, grid.row * each, each)


def _loss(
    model: Any, grid: Grid, chunk_tokens: int, *, labels: Tensor, shift_labels: Tensor | None = None, **kwargs: Any
) -> Any:
    """The output of a forward with labels."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    count = kwargs.pop("num_items_in_batch", None)
    hidden = model.base_model(**kwargs).last_hidden_state
    targets = next_tokens(labels) if shift_labels is None else shift_labels
    head = model.get_output_embeddings()
    numbers = {"chunk_tokens": chunk_tokens, "count": count}
    return CausalLMOutputWithPast(loss=cross_entropy(grid, hidden.flatten(0, -2), targets.flatten(), head, **numbers))
