"""Small models, trained with or without offload, for the tests beside."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW, Offload

Mode = Literal["full", "dense", "compact", "compact over bf16", "compact over int8"]
MODES: list[Mode] = ["full", "dense", "compact", "compact over bf16", "compact over int8"]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16), nn.LayerNorm(16), nn.Linear(16, 32)
    return nn.Sequential(nn.Embedding(32, 16), *layers)


def build(
    mode: Mode, offload: Offload | None = None, device: str = "cpu", **options: Any
) -> tuple[nn.Sequential, GrassAdamW]:
    """A network and its optimizer, the same for every ``offload``."""
    model = network().to(device)
    common: dict[str, Any] = {"lr": 1e-2, "offload": offload}
    if mode == "full":
        return model, GrassAdamW(model.parameters(), **common, stochastic_rounding="stochastic_rounding" in options)
    options = {"update_interval": 4, **options}
    if mode == "dense":
        return model, GrassAdamW(grass.param_groups(model, rank=4, **options), **common)
    if mode == "compact over bf16":
        model = model.to(torch.bfloat16)
    dtype = torch.float32 if mode == "compact over bf16" else None
    weights = "int8" if mode == "compact over int8" else None
    grass.compact(model, rank=4, explore=options.pop("explore", None), dtype=dtype, weights=weights)
    return model, GrassAdamW(model, **common, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    """The losses of an ordinary loop with clipping and a falling learning rate; returns right after the last step."""
    losses, device = [], next(model.parameters()).device
    for step in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        x = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step)).to(device)
        loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(a: Any, b: Any) -> bool:
    """Whether two nests of containers have equal values, tensors bit for bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
