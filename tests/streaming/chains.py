"""Chains of modules of any kind, streamed or resident, and a loop that trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import grass

WIDTH = 8


class Chain(nn.Module):
    """Modules one after another, each with what the one before returned."""

    def __init__(self, modules: list[nn.Module], unpack: Callable[[Any], Tensor] = lambda x: x, times: int = 1) -> None:
        super().__init__()
        self.units, self.unpack, self.times = nn.ModuleList(modules), unpack, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for unit in self.units:
                x = self.unpack(unit(x))
        return x


def pair(build: Callable[[], nn.Module], **stream: Any) -> tuple[nn.Module, nn.Module, grass.Stream]:
    torch.manual_seed(0)
    resident = build()
    streamed = copy.deepcopy(resident)
    return resident, streamed, grass.stream(streamed, device="cpu", **stream)


def train(model: nn.Module, steps: int, batches: int = 1, first: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        for batch in range(batches):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + batch))
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
