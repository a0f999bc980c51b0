"""Time whole training steps of a LLaMA against fused AdamW, galore-torch and apollo-torch, and against the floor.

    python scripts/bench/train_step.py                                # 350m's width, 4 layers, some minutes
    python scripts/bench/train_step.py --hidden 256 --intermediate 688 --repeats 3

All contestants train copies of one model on the same batch, in turn, ``--repeats`` times; the table gives medians.
``floor`` is the same model with its linear weights frozen: what remains when their gradients cost nothing. Gradient
and state bytes are those held right after backward and step. ``refreshing`` chooses new rows in every step; a refresh
every 10 steps adds a tenth of the difference, which the last line states.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import grass
from grass.command_line import ArgumentParser
from grass.memory import state_bytes
from grass.training.models import LlamaShape, build_llama, llama_config
from grass.training.optimizers import OptimizerConfig, build_optimizer

NEVER = 1_000_000_000


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


def compact(rank: float, dim: int, **options: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Grass in compact mode."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        grass.compact(model, rank=rank, dim=dim)
        return grass.GrassAdamW(model, **{**grass.PAPER, "update_interval": NEVER, "fused": True, **options})

    return build


def contestants(rank: float) -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """How each contestant's optimizer is built on a fresh copy of the model."""
    often = {"update_interval": 1, "selection": "multinomial_norm", "state_policy": "keep"}
    return {
        "adamw fused": adamw,
        "floor": floor,
        "grass compact dim=0": compact(rank, 0),
        "grass compact dim=1": compact(rank, 1),
        "grass compact dim=0 refreshing": compact(rank, 0, **often),
        "grass compact dim=1 refreshing": compact(rank, 1, **often),
        "grass dense dim=0": lambda m: grass.GrassAdamW(
            grass.param_groups(m, rank, **{**grass.PAPER, "dim": 0, "update_interval": NEVER}), fused=True
        ),
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
    for _ in range(args.repeats):
        for racer in racers.values():
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
    parser.add_argument("--rank", type=float, default=1 / 8, help="share of rows or columns trained")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[], help="names of contestants, by their beginning")
    parser.add_argument("--csv", type=Path, default=Path("runs/train_step.csv"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    result = table(race(args), args.batch_size * args.seq_len)
    print(result.to_string(index=False, float_format="%.3f"))
    by_name = result.set_index("optimizer").step_ms
    for dim in (0, 1):
        name = f"grass compact dim={dim}"
        if name in by_name:
            share = (by_name[f"{name} refreshing"] / by_name[name] - 1) / 10
            print(f"{name}: a refresh every 10 steps costs {share:.1%} of the time")
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    machine = {"torch": torch.__version__, "cpu": platform.machine(), "threads": torch.get_num_threads()}
    result.assign(**machine).to_csv(args.csv, index=False, float_format="%.5g")
    print(f"written to {args.csv}")


if __name__ == "__main__":
    main()
