"""A language model whose weights and activations are spread over a grid of ranks."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from grass.compact_mode.linear_classes import COUNTERPARTS
from grass.distributed.parallel_2d.calls import forward_on
from grass.distributed.parallel_2d.checks import check_mesh, check_model, head_size, norm_kind
from grass.distributed.parallel_2d.compact_linear import CompactLinear2D
from grass.distributed.parallel_2d.layers import Embedding2D, LayerNorm2D, Linear2D, RMSNorm2D, become
from grass.distributed.parallel_2d.mesh import FEATURES, TABLE, WEIGHT, WHOLE, Grid

COUNTERPARTS[Linear2D] = CompactLinear2D


def parallelize_2d(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    panels: int = 1,
    cache_panels: bool = False,
    chunk_tokens: int = 1024,
    batch_size: int | None = None,
) -> None:
    r"""Spread a model over a grid of ``a x b`` ranks, in place (Xu et al., 2021, arXiv 2104.05343, Optimus).

    Weights *and* activations are divided among all ranks: each has ``1 / (a b)`` of them. Call it before
    :func:`grass.compact` and before the optimizer is built; every rank has the same model. Then every rank calls the
    model with the same whole batch, by keywords, of which each row of the grid takes its part. The loss is that of the
    whole batch. Logits come back whole, and a loss of your own may be computed from them on every rank. Parameters
    become ``DTensor``, so that ``clip_grad_norm_``, ``state_dict`` and ``torch.distributed.checkpoint`` work as with
    FSDP2.

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
        batch_size: of the batches with labels to come; checked here if given, otherwise in the forward.

    Raises:
        TypeError: the model is no such decoder.
        ValueError: heads, hidden size, intermediate size, vocabulary or batch cannot be divided by the mesh; dropout;
            the ranks differ in their models or settings. The model is then as it was.
    """
    check_mesh(mesh, panels, chunk_tokens, batch_size)
    grid = Grid(mesh, panels, cache_panels)
    check_model(model, grid)
    shapes = {f"the shape of {name}": tuple(p.shape) for name, p in model.named_parameters()}
    settings = {"panels": panels, "cache_panels": cache_panels, "chunk_tokens": chunk_tokens}
    grid.everyone.verify_settings({"the mesh": mesh.mesh.tolist(), **settings, **shapes})
    for module in model.modules():
        _spread(module, grid, model)
    model.forward = MethodType(forward_on(grid, model, chunk_tokens), model)


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
