"""When the ranks exchange gradients: in the last micro-batch of a step, by DDP, FSDP2, or one all-reduce after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from grass.batches import batches
from grass.device import accelerator
from grass.parallel.ranks import Ranks
from grass.private_names import device_types_of

BUCKET = 25 << 20
"""Bytes of one all-reduce at most, unless a single gradient has more."""


@contextmanager
def synchronised(model: nn.Module, ranks: Ranks, is_last: bool) -> Iterator[None]:
    """A forward and backward, after whose last micro-batch gradients are the mean over the ranks."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
    elif isinstance(model, DistributedDataParallel):
        if is_last:
            yield
        else:
            with model.no_sync():
                yield
    else:
        yield
        if is_last:
            average_gradients(model, ranks)


@torch.no_grad()
def average_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Replace the gradients of a model without DDP by their mean over the ranks.

    The ranks may hold them in different places: on one rank the model may be streamed, with gradients in host memory,
    and resident on another. A parameter that has a gradient on some ranks only counts as zero on the others.
    """
    if ranks.group is None:
        return
    device = communicating(ranks)
    trained = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.int8, device=device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=ranks.group)
    with_gradient = [p for p, is_used in zip(trained, used.tolist(), strict=True) if is_used]
    for bucket in batches(with_gradient, lambda p: p.nbytes, BUCKET, lambda p: p.dtype):
        parts = [gradient_of(p).to(device) for p in bucket]
        ranks.mean_(parts)
        for p, part in zip(bucket, parts, strict=True):
            gradient_of(p).copy_(part)


def gradient_of(p: Tensor) -> Tensor:
    """A parameter's gradient; zeros if it has none."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def communicating(ranks: Ranks) -> torch.device:
    """Where tensors are that the ranks exchange."""
    takes_host = ranks.group is None or torch.device("cpu") in device_types_of(ranks.group)
    return torch.device("cpu") if takes_host else accelerator()
