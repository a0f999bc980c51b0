"""How many columns of a converted model differ from the frozen base after some steps: could trials share the base?

python scripts/bench/shared_base.py --csv benchmarks/shared_base.csv        # seconds
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser

WIDTH, LAYERS, RANK = 128, 4, 16


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--csv", type=Path, default=Path("runs/shared_base.csv"))
    args = parser.parse_args()
    rows = [{"explore": explore, "touched": touched(explore, args.steps)} for explore in (0, RANK)]
    result = pd.DataFrame(rows)
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, rank=RANK, width=WIDTH, steps=args.steps)


def touched(explore: int, steps: int) -> float:
    """The share of columns that a run has changed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    base = [weight.clone() for weight in weights(model)]
    grass.compact(model, rank=RANK, explore=explore, targets="all-linear")
    optimizer = grass.GrassAdamW(model, lr=1e-3)
    for _ in range(steps):
        x = torch.randn(32, WIDTH)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    grass.expand(model)
    changed = [(now != before).any(0) for now, before in zip(weights(model), base, strict=True)]
    return float(torch.cat(changed).float().mean())


def weights(model: nn.Module) -> list[torch.Tensor]:
    """The weights of all linear layers."""
    return [part.weight.detach() for part in model.modules() if isinstance(part, nn.Linear)]


if __name__ == "__main__":
    main()
