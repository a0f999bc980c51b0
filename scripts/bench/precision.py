"""What rounding costs on a long bfloat16 run: the same training at a small learning rate in several precisions.

    python scripts/bench/precision.py                       # some minutes
    python scripts/bench/precision.py --steps 20 --csv runs/precision.csv

A byte-level LLaMA (0.87 million parameters) trains on the Python standard library with Grass, which explores a quarter
of the columns in both modes. ``loss`` is the held-out loss at the end; ``unmoved`` the share of the elements of
attention and MLP weights that end as they began, all of which have had gradients; ``distance`` the norm of all changes
over that of the float32 run. Updates smaller than half the spacing of bfloat16 vanish when rounded to nearest; rounded
stochastically, or kept in float32 rows, they do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.memory import state_bytes
from grass.memory.llama import llama_config
from training.data.blocks import DataConfig
from training.data.loading import load_data
from training.run.models import build_llama

CONTESTANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bf16 weights, to nearest": {},
    "bf16 weights, stochastic rounding": {"stochastic_rounding": True},
    "bf16 weights, stochastic rounding, bf16 moments": {"stochastic_rounding": True, "moment_dtype": "bfloat16"},
    "bf16 weights, stochastic rounding, 8-bit moments": {"stochastic_rounding": True, "moment_dtype": "8bit"},
    "compact, bf16 rows, to nearest": {"compact": {}},
    "compact, bf16 rows, stochastic rounding": {"compact": {}, "stochastic_rounding": True},
    "compact, float32 rows over bf16": {"compact": {"dtype": torch.float32}, "stochastic_rounding": True},
}
"""``stochastic_rounding`` reaches embeddings and norms too, under float32 rows as well."""


def build(args: argparse.Namespace, vocab_size: int, **options: Any) -> tuple[nn.Module, grass.GrassAdamW]:
    """A model and its optimizer."""
    config = llama_config("1m", vocab_size=vocab_size, max_seq_len=args.seq_len)
    model = build_llama(config, seed=0, dtype=options.pop("dtype", torch.bfloat16))
    compact = options.pop("compact", None)
    options |= {"lr": args.lr, "weight_decay": 0.0, "explore": 0.25}
    if compact is None:
        return model, grass.GrassAdamW(grass.param_groups(model, rank=0.25), **options)
    grass.compact(model, rank=0.25, explore=0.25, **compact)
    return model, grass.GrassAdamW(model, **options)


def linear_weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """The attention and MLP weights, in float32."""
    for name in grass.matched_modules(model):
        yield model.get_submodule(name).weight.detach().float()


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train one contestant."""
    data = load_data(DataConfig(batch_size=args.batch_size, seq_len=args.seq_len, eval_blocks=64))
    model, optimizer = build(args, data.vocab_size, **CONTESTANTS[name])
    start = [w.clone() for w in linear_weights(model)]
    for _ in range(args.steps):
        ids = next(data.train)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    with torch.no_grad():
        losses = [model(input_ids=ids[None], labels=ids[None]).loss.item() for ids in data.eval_blocks]
    moved = [after - before for before, after in zip(start, linear_weights(model), strict=True)]
    return {
        "precision": name,
        "loss": sum(losses) / len(losses),
        "unmoved": sum((m == 0).sum().item() for m in moved) / sum(m.numel() for m in moved),
        "distance": sum(m.square().sum().item() for m in moved) ** 0.5,
        "state_mb": state_bytes(optimizer).device / 1e6,
    }


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--csv", type=Path, default=Path("runs/precision.csv"))
    args = parser.parse_args()
    rows = []
    for name in args.only:
        torch.manual_seed(0)
        rows.append(measure(args, name))
        print(rows[-1], flush=True)
        result = pd.DataFrame(rows)
        result["distance"] /= result["distance"][0]
        write(result, args.csv, steps=args.steps, lr=args.lr)


if __name__ == "__main__":
    main()
