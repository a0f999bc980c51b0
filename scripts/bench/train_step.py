"""Time whole training steps of a LLaMA against fused AdamW, galore-torch and apollo-torch, and against the floor.

    python scripts/bench/train_step.py                                # 350m's width, 4 layers, some minutes
    python scripts/bench/train_step.py --hidden 256 --intermediate 688 --repeats 3
    python scripts/bench/train_step.py --hidden 64 --intermediate 172 --layers 1 --seq-len 32 --repeats 1    # seconds

All contestants train copies of one model on the same batch, in turn, ``--repeats`` times, every other time in reverse
order; the table gives medians. Grass runs with its defaults except for what the row names, and no step refreshes except
in rows that say so. ``r=1/4, nothing explored`` trains as many columns as the default at ``--rank 0.125``, all with
state. ``floor`` is the same model with its linear weights frozen: what remains when their gradients cost nothing.
Gradient and state bytes are those held right after backward and step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.memory import state_bytes
from grass.memory.llama import LlamaShape, llama_config
from training.run.models import build_llama
from training.run.optimizers import OptimizerConfig, build_optimizer

NEVER = 1_000_000_000
Build = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class Racer:
    """A model, its optimizer and the seconds its steps took."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float]
    gradient_bytes: int = 0

    def step(self, ids: Tensor) -> None:
        """One training step."""
        start = time.perf_counter()
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.gradient_bytes = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Torch's fused AdamW over what trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def floor(model: nn.Module) -> torch.optim.Optimizer:
    """The linear weights frozen."""
    for name in grass.matched_modules(model):
        model.get_submodule(name).weight.requires_grad_(False)
    return adamw(model)


def compact(rank: float, explore: float | None = None, dim: int = 1, **options: object) -> Build:
    """Grass in compact mode."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        grass.compact(model, rank=rank, explore=explore, dim=dim)
        return grass.GrassAdamW(model, **{"update_interval": NEVER, "fused": True, **options})

    return build


def dense(rank: float, **options: object) -> Build:
    """Grass in dense mode."""
    return lambda model: grass.GrassAdamW(grass.param_groups(model, rank, update_interval=NEVER, **options), fused=True)


def contestants(rank: float) -> dict[str, Build]:
    """How each contestant's optimizer is built on a fresh copy of the model."""
    by_norm = {"update_interval": 1, "selection": "multinomial_norm"}
    return {
        "adamw fused": adamw,
        "floor": floor,
        "grass compact": compact(rank),
        "grass compact r=1/4, nothing explored": compact(1 / 4, explore=0),
        "grass compact dim=0": compact(rank, dim=0),
        "grass compact, a refresh in each step": compact(rank, update_interval=1),
        "grass compact, a refresh by norm in each step": compact(rank, **by_norm),
        "grass dense": dense(rank),
        "grass dense, nothing explored": dense(rank, explore=0),
        "galore": lambda m: build_optimizer(m, OptimizerConfig(name="galore", rank=rank, update_interval=NEVER)),
        "apollo": lambda m: build_optimizer(m, OptimizerConfig(name="apollo", rank=rank, update_interval=NEVER)),
    }


def race(args: argparse.Namespace) -> dict[str, Racer]:
    """Step every contestant in turn."""
    shape = LlamaShape(args.hidden, args.intermediate, args.layers, args.hidden // 64)
    base = build_llama(llama_config(shape, vocab_size=256, max_seq_len=args.seq_len))
    ids = torch.randint(256, (args.batch_size, args.seq_len))
    racers = {}
    for name, build in contestants(args.rank).items():
        if not args.only or any(name.startswith(o) for o in [*args.only, "adamw", "floor"]):
            model = copy.deepcopy(base)
            racers[name] = Racer(model, build(model), [])
            racers[name].step(ids)  # state is made, peers project for the first time
            racers[name].seconds.clear()
    for repeat in range(args.repeats):
        for racer in reversed(racers.values()) if repeat % 2 else racers.values():
            racer.step(ids)
    return racers


def table(racers: dict[str, Racer], tokens: int) -> pd.DataFrame:
    """One row a contestant."""
    median = {name: statistics.median(racer.seconds) for name, racer in racers.items()}
    return pd.DataFrame(
        {
            "optimizer": name,
            "step_ms": median[name] * 1e3,
            "tokens_per_s": tokens / median[name],
            "times_adamw": median["adamw fused"] / median[name],
            "of_floor": median["floor"] / median[name],
            "gradient_mb": racer.gradient_bytes / 1e6,
            "state_mb": state_bytes(racer.optimizer).device / 1e6,
        }
        for name, racer in racers.items()
    )


def parse() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2736)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument(
        "--rank", type=float, default=1 / 8, help="share of columns with state: Grass explores as many more"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[], help="names of contestants, by their beginning")
    parser.add_argument("--csv", type=Path, default=Path("runs/train_step.csv"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    result = table(race(args), args.batch_size * args.seq_len)
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, hidden=args.hidden, layers=args.layers, rank=args.rank, repeats=args.repeats)


if __name__ == "__main__":
    main()
