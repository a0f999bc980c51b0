"""The first selection of converted layers by gradient norms instead of at random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from grass.compact_mode.active_rows import explore
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.refresh_cycle import gathered_norms
from grass.parallel.ranks import Ranks
from grass.selection.draws import draw_generator
from grass.selection.exploration import draw_explored
from grass.selection.rules import select_rows


def calibrate(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """Select the rows with the largest gradient of ``loss(model)``. Gradients of parameters do not change.

    A layer that the loss does not depend on keeps its rows. Call it before the optimizer's first step, in a distributed
    run on every rank: gradients are averaged over the ranks.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, CompactLayer)]
    for layer in layers:
        layer.begin_sketch(None)
    sketches = [layer.sketch for layer in layers if layer.sketch is not None]
    try:
        with torch.enable_grad():
            grads = torch.autograd.grad(loss(model), sketches, allow_unused=True)
        for sketch, grad in zip(sketches, grads, strict=True):
            sketch.grad = grad
    finally:
        norms = gathered_norms(layers, Ranks.of(None))
    for layer, layer_norms in zip(layers, norms, strict=True):
        if layer_norms.any():
            generator = draw_generator(*layer.first_draw)  # for experts without tokens
            layer.select(select_rows(layer_norms, layer.rank, generator=generator, experts=layer.experts).indices)
            explore([layer], [_first_explored(layer)])
            layer.first_rows = layer.chosen.to("cpu", copy=True)


def _first_explored(layer: CompactLayer) -> Tensor:
    """The rows that a layer explores in its first step."""
    seed, place = layer.first_draw
    sizes = layer.shape[layer.dim], layer.explored.numel()
    return draw_explored(layer.selected, *sizes, seed, place, 0, layer.experts)
