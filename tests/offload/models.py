"""A tiny language model trained in ways that read parameters without their module, for tests of the forward hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import grass
from grass import GrassAdamW, Offload

SLOW = Offload(_bytes_per_second=1e6)
"""A step is still on its way when the next forward begins: a missing wait shows."""
DENSE_MODES = ["full", "dense"]
EVERY_MODE = [*DENSE_MODES, "compact"]
BATCHES = [torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(i)) for i in range(8)]
Loss = Callable[[Any, Tensor], Tensor]


def optimizer_for(model: nn.Module, mode: str, offload: Offload | None) -> GrassAdamW:
    if mode == "full":
        return GrassAdamW(model.parameters(), lr=1e-2, offload=offload)
    options: dict[str, Any] = {"update_interval": 3, "selection": "multinomial_norm"}
    if mode == "dense":
        return GrassAdamW(grass.param_groups(model, rank=4, **options), lr=1e-2, offload=offload)
    grass.compact(model, rank=4)
    return GrassAdamW(model, lr=1e-2, offload=offload, **options)


def whole(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=x, labels=x).loss
    return loss


def base_and_head(model: Any, x: Tensor) -> Tensor:
    """Calls only the base model, and reads the head's weight without its module."""
    hidden = model.model(input_ids=x).last_hidden_state
    return F.cross_entropy(F.linear(hidden, model.lm_head.weight).flatten(0, 1), x.flatten())


def step(model: nn.Module, optimizer: GrassAdamW, i: int, loss: Loss = whole) -> float:
    value = loss(model, BATCHES[i])
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def steps(model: nn.Module, optimizer: GrassAdamW, count: int = 5, loss: Loss = whole) -> list[float]:
    return [step(model, optimizer, i, loss) for i in range(count)]


@torch.no_grad()
def evaluated(model: nn.Module, loss: Loss = whole) -> float:
    return loss(model, BATCHES[-1]).item()
