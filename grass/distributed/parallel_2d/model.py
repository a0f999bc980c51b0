"""A language model whose weights and activations are spread over a grid of ranks."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from grass.compact_mode.classes import COUNTERPARTS
from grass.distributed.parallel_2d.checks import check_mesh, check_model, head_size, norm_kind
from grass.distributed.parallel_2d.compact_linear import CompactLinear2D
from grass.distributed.parallel_2d.layers import Embedding2D, LayerNorm2D, Linear2D, RMSNorm2D, become
from grass.distributed.parallel_2d.loss import IGNORED, cross_entropy
from grass.distributed.parallel_2d.mesh import FEATURES, TABLE, WEIGHT, WHOLE, Grid, arrived
from grass.parallel.ranks import Ranks

COUNTERPARTS[Linear2D] = CompactLinear2D

OF_BATCH = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")
"""Arguments of a model's forward whose first dimension is the batch."""


def parallelize_2d(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    panels: int = 1,
    cache_panels: bool = False,
    chunk_tokens: int = 1024,
) -> None:
    r"""Spread a model over a grid of ``a x b`` ranks, in place (Xu et al., 2021, arXiv 2104.05343, Optimus).

    Weights *and* activations are divided among all ranks: each has ``1 / (a b)`` of them. Call it before
    :func:`grass.compact` and before the optimizer is built; every rank has the same model. Then every rank calls the
    model with the same whole batch, of which each row of the grid takes its part. The loss is that of the whole batch,
    logits come back whole. Parameters become ``DTensor``, so that ``clip_grad_norm_``, ``state_dict`` and
    ``torch.distributed.checkpoint`` work as with FSDP2.

    With labels the loss is computed in chunks of tokens and the output has no logits.

    Args:
        model: a decoder like LLaMA of transformers (LLaMA, Mistral, Qwen2, Qwen3, ...): linear layers, norms, rotary
            embeddings, an untied head.
        mesh: of two dimensions, rows and columns, where the number of rows is a multiple of that of columns. A third
            dimension before them holds replicas, each of which gets batches of its own.
        panels: pieces in which blocks travel; the next one is on its way while one is multiplied. More pieces need
            less memory for gathered blocks and more messages.
        cache_panels: in compact mode, keep gathered frozen weights, ``1 / b`` of each on a rank, and send only the
            columns that a step has changed.
        chunk_tokens: tokens of a rank whose logits exist at a time in the loss.

    Raises:
        TypeError: the model is no such decoder.
        ValueError: heads, hidden size, intermediate size or vocabulary cannot be divided by the mesh; the ranks differ
            in their models or settings. The model is then as it was.
    """
    check_mesh(mesh, panels, chunk_tokens)
    grid = Grid(mesh, panels, cache_panels)
    check_model(model, grid)
    shapes = {f"the shape of {name}": tuple(p.shape) for name, p in model.named_parameters()}
    settings = {"panels": panels, "cache_panels": cache_panels, "chunk_tokens": chunk_tokens}
    Ranks.of(None).verify_settings({"the mesh": mesh.mesh.tolist(), **settings, **shapes})
    for module in model.modules():
        _spread(module, grid, model)
    model.forward = MethodType(_forward(model, grid, chunk_tokens), model)


def _spread(module: nn.Module, grid: Grid, model: Any) -> None:
    """Make a layer compute with its part of its parameters."""
    if type(module) is nn.Linear:
        become(module, Linear2D, grid, weight=WEIGHT, bias=FEATURES)
    elif type(module) is nn.Embedding:
        become(module, Embedding2D, grid, weight=TABLE)
    elif (kind := norm_kind(module)) is not None:
        of_heads = kind.size == head_size(model.config)
        placements = WHOLE if of_heads else FEATURES
        if kind.centers:
            become(module, LayerNorm2D, grid, weight=placements, bias=placements, eps=kind.eps)
        else:
            numbers = {"eps": kind.eps, "squares_dtype": kind.squares_dtype, "of_heads": of_heads}
            become(module, RMSNorm2D, grid, weight=placements, **numbers)


def _forward(model: Any, grid: Grid, chunk_tokens: int) -> Any:
    """The model's forward: takes whole batches, returns the whole batch's loss or logits."""
    plain = type(model).forward

    @functools.wraps(plain)
    def forward(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise TypeError("A model on a grid takes input_ids and keyword arguments")
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("Invalid inputs_embeds: a model on a grid takes input_ids")
        batch, training = input_ids.shape[0], kwargs.get("labels") is not None
        if training and batch % grid.rows:
            raise ValueError(f"A batch of {batch} cannot be divided among {grid.rows} rows of ranks")
        own = {name: _own_part(value, name, batch, grid) for name, value in {"input_ids": input_ids, **kwargs}.items()}
        if training:
            return _loss(self, grid, chunk_tokens, **own)
        output = plain(self, **own)
        output.logits = _whole(output.logits, grid)[:batch]
        return output

    return forward


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
    targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shift_labels is None else shift_labels
    head = model.get_output_embeddings()
    numbers = {"chunk_tokens": chunk_tokens, "count": count}
    return CausalLMOutputWithPast(loss=cross_entropy(grid, hidden.flatten(0, -2), targets.flatten(), head, **numbers))


def _whole(logits: Tensor, grid: Grid) -> Tensor:
    """``(b/a, s, V/b) -> (b, s, V)`` on every rank."""
    vocabulary = torch.cat(list(arrived(grid.gather_row(logits))), dim=-1)
    return torch.cat(list(arrived(grid.gather_column(vocabulary))))
