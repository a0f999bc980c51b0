"""A small module of experts of our own, with every routing that can occur, and the same one from separate layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import grass

EXPERTS, INNER, OUTER = 4, 12, 10


class Experts(nn.Module):
    """Two weights, one of them stored inputs first."""

    grass_experts: ClassVar = {"up": False, "down": True}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, OUTER, dtype=torch.float64) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, OUTER, dtype=torch.float64) / 3)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return grass.expert_linear(self, "down", grass.expert_linear(self, "up", x, ends).tanh(), ends)


class Separate(nn.Module):
    """The same from one pair of linear layers for each expert."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.pairs = nn.ModuleList()
        for up, down in zip(experts.up, experts.down, strict=True):
            pair = nn.ModuleList([nn.Linear(OUTER, INNER, bias=False), nn.Linear(INNER, OUTER, bias=False)]).double()
            for layer, weight in zip(pair, (up, down.t()), strict=True):
                layer.weight.data = weight.detach().clone()  # type: ignore[operator, assignment]
            self.pairs.append(pair)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        limits, parts = [0, *ends.tolist()], []
        for pair, start, end in zip(self.pairs, limits, limits[1:], strict=False):
            if start < end:
                parts.append(pair[1](pair[0](x[start:end]).tanh()))  # type: ignore[index]
        return torch.cat(parts)


def batch(step: int, *, rests: bool = True) -> tuple[Tensor, Tensor]:
    """Tokens sorted by expert; in some steps one or two experts get none."""
    counts = [5, 3, 4, 6]
    if rests and step % 3 == 1:
        counts = [0, 9, 0, 4]
    if rests and step % 3 == 2:
        counts = [7, 0, 5, 1]
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(counts), OUTER, generator=generator, dtype=torch.float64)
    return x, torch.tensor(counts).cumsum(0)


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, *, rests: bool = True
) -> list[float]:
    losses, device = [], next(model.parameters()).device
    for step in range(first, first + steps):
        x, ends = (t.to(device) for t in batch(step, rests=rests))
        loss = (model(x, ends) - x.roll(1, 1)).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
