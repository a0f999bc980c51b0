"""Small models that are streamed or resident, and an ordinary training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import grass
from grass import GrassAdamW

MODES = ["full", "dense", "compact", "compact over bf16", "compact over int8"]


class Block(nn.Module):
    """Attention-free: two layers with a norm and dropout, added to the input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + self.dropout(y) + (0 if shift is None else shift)


class Network(nn.Module):
    """Embedding, blocks, head; ``checkpointed`` as a resident model is, to compare with a streamed one."""

    def __init__(self, blocks: int = 4, width: int = 16, dropout: float = 0.1, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.checkpointed = nn.Embedding(32, width), checkpointed
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, shift=self.shift, use_reentrant=False)
            else:
                x = block(x, shift=self.shift)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(
    mode: str, *, streamed: bool, offload: Any = None, stream: Any = None, device: str = "cpu", **options: Any
) -> tuple[Any, Any]:
    """A network and its optimizer; the same values for all ways to run it. ``stream``: what ``grass.stream`` takes."""
    torch.manual_seed(0)
    model: nn.Module = Network(checkpointed=not streamed).to("cpu" if streamed else device)
    common: dict[str, Any] = {"lr": 3e-2, "offload": offload}
    half, int8 = mode == "compact over bf16", mode == "compact over int8"
    if mode == "full":
        optimizer = GrassAdamW(model.parameters(), **common, **options)
    elif mode == "dense":
        groups = grass.param_groups(model, rank=4, **{"update_interval": 4, **options})
        optimizer = GrassAdamW(groups, **common)
    else:
        model = model.to(torch.bfloat16) if half else model
        chosen = {"rank": 4, "explore": options.pop("explore", None), "dim": options.pop("dim", 1)}
        grass.compact(model, **chosen, dtype=torch.float32 if half else None, weights="int8" if int8 else None)
        optimizer = GrassAdamW(model, **common, **{"update_interval": 4, **options})
    if streamed:
        model.handle = grass.stream(model, device=device, **(stream or {}))  # type: ignore[assignment]
    return model, optimizer


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, batches: int = 1, clip: float = 1.0
) -> list[float]:
    """The losses of an ordinary loop with clipping, a falling learning rate and micro-batches."""
    losses, device = [], model.embedding.weight.device
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 / (1 + step / 10)
        for _ in range(batches):
            ids = torch.randint(32, (4, 8)).to(device)
            loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()) / batches
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses
