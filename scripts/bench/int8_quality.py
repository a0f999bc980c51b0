"""Held-out loss with frozen weights in float32, bfloat16 and 8 bits, all under float32 active rows.

    python scripts/bench/int8_quality.py                # LLaMA 1m on the embedded corpus, some minutes for each row
    python scripts/bench/int8_quality.py --steps 4      # checks that it runs

The runs of one seed differ only in the storage of the frozen weights. In 8 bits the explored columns, as many as have
state, are quantised again in each step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.memory.llama import llama_config
from training.data.blocks import DataConfig
from training.data.loading import load_data
from training.run.config import TrainConfig
from training.run.loop import Trainer
from training.run.models import build_llama

STORAGE: dict[str, tuple[torch.dtype, str | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
}
"""The contestants: dtype of the model, and ``weights`` of :func:`grass.compact`."""


def final_loss(storage: str, dim: int, seed: int, args: argparse.Namespace) -> float:
    """Train one model and evaluate it."""
    dtype, weights = STORAGE[storage]
    data = load_data(DataConfig(seed=seed, seq_len=256, eval_blocks=args.eval_blocks))
    model = build_llama(llama_config("1m", vocab_size=data.vocab_size, max_seq_len=256), seed=seed, dtype=dtype)
    grass.compact(model, rank=args.rank, dim=dim, dtype=torch.float32, weights=weights, seed=seed)
    optimizer = grass.GrassAdamW(model, lr=args.lr, scale=args.scale, weight_decay=0.0, seed=seed)
    config = TrainConfig(
        out=args.out / f"{storage}-{dim}-{seed}", steps=args.steps, warmup=args.steps // 10, eval_every=args.steps
    )
    return Trainer(model, optimizer, data, config).run().eval_loss


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--steps", type=int, default=540)
    parser.add_argument("--rank", type=float, default=1 / 8, help="share of columns with state; as many are explored")
    parser.add_argument("--lr", type=float, default=0.012)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--dims", type=int, nargs="+", default=[1])
    parser.add_argument("--eval-blocks", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("runs/int8_quality"))
    parser.add_argument("--csv", type=Path, default=Path("runs/int8_quality.csv"))
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        for dim in args.dims:
            for storage in STORAGE:
                loss = final_loss(storage, dim, seed, args)
                run = {"dim": dim, "rank": args.rank, "seed": seed, "steps": args.steps}
                rows.append({"weights": storage, **run, "eval_loss": loss})
                write(pd.DataFrame(rows), args.csv)
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
