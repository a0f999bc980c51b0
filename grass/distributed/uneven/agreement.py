"""Replicas on unlike devices, whose kernels differ in last bits, are made equal again, by default at every refresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from grass.batches import batches
from grass.compact_mode.layer import CompactLayer
from grass.distributed.uneven.gradients import BUCKET, communicating
from grass.parallel.ranks import Ranks


def agree(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None = None, *, every: int = 200
) -> RemovableHandle:
    """From now on, send the first rank's weights and active rows to all others after each step that refreshes.

    Ranks reduce the same gradients, but unlike devices may round the updates differently. Such differences would add up
    in weights. All trained weights are sent, and of converted layers what is active: values and indices. Where they are
    equal, nothing is written. Selections are equal before, because they follow from seeds and from the first rank's
    norms; ranks that have selected other rows are an error of the step.

    Args:
        model: a replica, also inside of DDP, or streamed on some ranks.
        optimizer: of the model. Every rank calls its ``step``.
        group: the ranks; ``None``: all.
        every: after so many steps without, weights are sent too: not every optimizer has refreshes.

    Returns:
        A handle; ``remove()`` ends it.

    Raises:
        ValueError: the model is sharded, so that there are no replicas, or the optimizer has none of its parameters;
            ``every`` is below 1.
    """
    if every < 1:
        raise ValueError(f"Invalid every={every}: must be >= 1")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("agree() takes replicas: this model is sharded")
    held = {id(p) for one in optimizer.param_groups for p in one["params"]}
    if not any(id(p) in held for p in model.parameters()):
        raise ValueError("agree() takes the model that the optimizer trains: it has none of this model's parameters")
    ranks, refreshed, steps = Ranks.of(group), _last_refresh(optimizer), 0

    def after(*_: Any) -> None:
        nonlocal refreshed, steps
        before, refreshed, steps = refreshed, _last_refresh(optimizer), steps + 1
        if refreshed == before and steps < every:
            return
        steps = 0
        if ranks.group is not None:
            send(model, ranks)

    return optimizer.register_step_post_hook(after)


@torch.no_grad()
def send(model: nn.Module, ranks: Ranks) -> None:
    """Make this rank's weights equal to the first rank's. Every rank has to call this."""
    layers = [module for module in model.modules() if isinstance(module, CompactLayer)]
    of_layers = {id(tensor) for layer in layers for tensor in _tensors_of(layer)}
    write(differing([p for p in model.parameters() if p.requires_grad and id(p) not in of_layers], ranks))
    for layer in layers:
        layer.before_saving()
        found = differing(_tensors_of(layer), ranks)
        if found:
            layer.before_change()
            write(found)
            layer.mark_synced()
            layer.after_change(everything=True)


def differing(own: Sequence[Tensor], ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """The tensors that are not those of the first rank, each with the first rank's values."""
    device, found = communicating(ranks), []
    for bucket in batches(list(own), lambda tensor: tensor.nbytes, BUCKET, lambda tensor: tensor.dtype):
        firsts = [tensor.to(device, copy=True) for tensor in bucket]
        ranks.first_(firsts)
        pairs = [(tensor, first.to(tensor.device)) for tensor, first in zip(bucket, firsts, strict=True)]
        found += [(tensor, first) for tensor, first in pairs if not torch.equal(tensor, first)]
    return found


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give each tensor the values beside it."""
    for tensor, values in pairs:
        tensor.copy_(values)


def _tensors_of(layer: CompactLayer) -> list[Tensor]:
    """What a converted layer computes with."""
    found: dict[str, Tensor | None] = {**layer._parameters, **layer._buffers}
    return [tensor for tensor in found.values() if tensor is not None and tensor.numel()]


def _last_refresh(optimizer: Optimizer) -> int:
    """The step of the newest selection of a ``GrassAdamW``; else 0."""
    return max((int(state.get("refresh_step", 0)) for state in optimizer.state.values()), default=0)
