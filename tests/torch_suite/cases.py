"""The two optimizers under test, and what they train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grass import GrassAdamW

RANKS: dict[str, dict[str, Any]] = {"plain": {"rank": None}, "half": {"rank": 0.5, "update_interval": 3}}

HARMLESS: dict[str, dict[str, Any]] = {
    "default": {},
    "other lr": {"lr": 0.01},
    "no decay": {"weight_decay": 0.0},
    "decay": {"weight_decay": 0.1},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "tensor lr": {"lr": torch.tensor(0.001)},
    "foreach": {"foreach": True},
    "no foreach": {"foreach": False},
    "no fused": {"fused": False},
    "all of AdamW's": {"amsgrad": False, "capturable": False, "differentiable": False, "foreach": None, "fused": None},
}
"""Arguments of ``torch.optim.AdamW`` that ``GrassAdamW`` takes too."""

Build = Callable[..., GrassAdamW]

both = pytest.mark.parametrize(
    "build", [functools.partial(GrassAdamW, **options) for options in RANKS.values()], ids=RANKS
)
harmless = pytest.mark.parametrize("options", HARMLESS.values(), ids=HARMLESS)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix, a convolution, a vector, a scalar, and a matrix without elements."""
    generator = torch.Generator().manual_seed(3)
    shapes: list[tuple[int, ...]] = [(6, 4), (4, 3, 2, 2), (5,), (), (0, 4)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(held: Iterable[Tensor], seed: int) -> None:
    """Give each parameter a gradient that depends only on the seed and its shape."""
    for p in held:
        generator = torch.Generator().manual_seed(seed)
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)


def take_steps(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], seeds: Iterable[int]) -> None:
    """One step for each seed."""
    for seed in seeds:
        set_gradients(held, seed)
        optimizer.step()


def values(held: Iterable[Tensor]) -> list[Tensor]:
    """Copies of the parameters' values."""
    return [p.detach().clone() for p in held]


def assert_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """The tensors are equal to the bit."""
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def regression() -> tuple[nn.Linear, Callable[[], Tensor]]:
    """A layer and the loss of fitting a fixed target with it."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(10, 5), torch.rand(10), torch.rand(5)
    return layer, lambda: (layer(x) - y).square().sum()
