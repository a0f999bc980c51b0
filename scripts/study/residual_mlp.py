"""Losses of another kind of model: a residual MLP that predicts a byte from the eight before it.

    python scripts/study/residual_mlp.py     # benchmarks/quality/residual_mlp.csv, some minutes

Compact mode is put beside AdamW by changing one line, as ``docs/from-adamw.md`` says: one learning rate for all
parameters, ``scale="auto"``, embedding and head at full rank. Four blocks of hidden size 96, GELU, float32, 300 steps
of 256 bytes of the standard library, no decay, constant rates. The loss is the mean of the last 50 steps' training
losses. Rates run with the first seed; the other seeds run at the rate that is best for most methods.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from training.data.corpus import standard_library

BEFORE, STEPS, BATCH, LAST = 8, 300, 256, 50
RATES, OTHER_SEEDS, AT_BEST = (1e-3, 2e-3, 4e-3, 8e-3), (1, 2), 4e-3
METHODS: dict[str, float | None] = {"AdamW": None, "r = q = n/4": 0.25, "r = q = n/8": 0.125, "r = q = n/16": 0.0625}
"""Ranks; ``None`` trains with torch's AdamW."""


class ResidualMLP(nn.Module):
    """Embeddings of the bytes before, side by side, and four blocks."""

    def __init__(self, hidden: int = 96, blocks: int = 4) -> None:
        super().__init__()
        widths = [BEFORE * hidden, *[hidden] * (blocks - 1)]
        self.embedding = nn.Embedding(256, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        self.up = nn.ModuleList(nn.Linear(width, hidden) for width in widths)
        self.down = nn.ModuleList(nn.Linear(hidden, hidden) for _ in widths)
        self.lm_head = nn.Linear(hidden, 256)

    def forward(self, before: Tensor) -> Tensor:
        """``before (batch, 8)`` -> logits ``(batch, 256)``."""
        x = self.embedding(before).flatten(1)
        for block, (norm, up, down) in enumerate(zip(self.norms, self.up, self.down, strict=True)):
            y = down(F.gelu(up(norm(x))))
            x = y if block == 0 else x + y
        return self.lm_head(x)  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module, rank: float | None, lr: float, exclude: tuple[str, ...] = ()) -> Optimizer:
    if rank is None:
        return AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    grass.compact(model, rank=rank, exclude=exclude)
    return grass.GrassAdamW(model, lr=lr, weight_decay=0.0)


def batches(text: Tensor, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - BEFORE, (BATCH, 1), generator=generator)
        window = text[starts + torch.arange(BEFORE + 1)].long()
        return window[:, :BEFORE], window[:, BEFORE]

    return draw


def train(text: Tensor, rank: float | None, lr: float, seed: int, steps: int = STEPS) -> float:
    """Mean loss of the last steps."""
    torch.manual_seed(seed)
    model, draw = ResidualMLP(), batches(text, seed)
    optimizer, losses = optimizer_of(model, rank, lr), list[float]()
    for _ in range(steps):
        before, target = draw()
        loss = F.cross_entropy(model(before), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.fmean(losses[-LAST:])


def text_of_the_library() -> Tensor:
    """The bytes of all files, one after the other."""
    return torch.frombuffer(bytearray("".join(file.text for file in standard_library()).encode()), dtype=torch.uint8)


def sweep(
    methods: Mapping[str, Any], rates: Sequence[float], at_best: float, loss_of: Callable[[Any, float, int], float]
) -> pd.DataFrame:
    """Losses by method, rate and seed: the first seed runs with all rates, the others with the best.

    Args:
        methods: what ``loss_of`` is given first, by name.
        rates: of the first seed.
        at_best: of the others.
        loss_of: of a method, a rate and a seed.
    """
    rows = []
    for name, method in methods.items():
        for seed, lr in [(0, lr) for lr in rates] + [(seed, at_best) for seed in OTHER_SEEDS]:
            rows.append({"method": name, "lr": lr, "seed": seed, "loss": loss_of(method, lr, seed)})
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def parse(argv: list[str] | None, text: str, steps: int, name: str) -> Namespace:
    """The flags ``--steps`` and ``--csv``, which is a file of ``benchmarks/quality`` if not given; takes one thread."""
    parser = ArgumentParser(text)
    parser.add_argument("--steps", type=int, default=steps)
    default = Path(__file__).parents[2] / "benchmarks" / "quality" / name
    parser.add_argument("--csv", type=Path, default=default)
    torch.set_num_threads(1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv, __doc__, STEPS, "residual_mlp.csv")
    text = text_of_the_library()
    losses = sweep(METHODS, RATES, AT_BEST, lambda rank, lr, seed: train(text, rank, lr, seed, args.steps))
    write(losses, args.csv, steps=args.steps)


if __name__ == "__main__":
    main()
