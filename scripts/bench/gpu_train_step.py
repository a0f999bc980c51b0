"""Whole bfloat16 training steps of a LLaMA on a GPU: Grass in compact mode against fused AdamW.

    python scripts/bench/gpu_train_step.py --out benchmarks/gpu    # LLaMA 1B, four minutes on an H100
    python scripts/bench/gpu_train_step.py --smoke                 # tiny, on the tests' stand-in, times meaningless

Each contestant trains a model of its own from the same weights on the same tokens; the table gives the mean step,
refreshes included, how long the host queued it and of that the optimizer's ``step()``, the peak of allocated memory and
the throughput relative to AdamW. As in a training loop, the host waits for the GPU once in ten steps, to read the loss.
Where queueing takes as long as the step, the GPU waits for its host. ``alone_ms`` is the same with a wait in each step.

Grass has float32 active rows and its defaults except for what the row names; r = q = n/8 where nothing else is said.
``frozen`` is the floor: linear weights without gradients. The model is the 1b of the papers with an intermediate size
of 5,504: 5,461, theirs, is odd, so cuBLAS multiplies with kernels that do not use a Hopper GPU's own instructions.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

sys.path.append(str(Path(__file__).parent / "kernels"))
from harness import machine, parse, step_device

import grass
from grass.memory.llama import LlamaShape, llama_config

sys.path.append(str(Path(__file__).parents[1]))
from training.run.models import build_llama

DEVICE = step_device()
SHAPES = {"1b, intermediate size 5504": LlamaShape(2048, 5504, 24, 32)}
"""Models that have no name of their own."""
BY_NORM = {"update_interval": 10, "selection": "multinomial_norm", "state_policy": "bank"}


def adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


def frozen(model: nn.Module) -> Optimizer:
    for name in grass.matched_modules(model):
        model.get_submodule(name).weight.requires_grad_(False)
    return adamw(model)


def compact(
    rank: float = 1 / 8, explore: int | None = None, dim: int = 1, **options: object
) -> Callable[[nn.Module], Optimizer]:
    def build(model: nn.Module) -> Optimizer:
        grass.compact(model, rank=rank, explore=explore, dim=dim, dtype=torch.float32)
        return grass.GrassAdamW(model, lr=1e-4, **options)

    return build


ADAMW = "adamw fused"
CONTESTANTS: dict[str, Callable[[nn.Module], Optimizer]] = {
    ADAMW: adamw,
    "frozen": frozen,
    "grass": compact(),
    "grass r=1/4, nothing explored": compact(1 / 4, explore=0),
    "grass, by norm with a bank every 10 steps": compact(**BY_NORM),
    "grass dim=0": compact(dim=0),
}


def measure(build: Callable[[nn.Module], Optimizer], batch_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Mean milliseconds of a step, of its host, and of a step that the host waits for; and peak memory."""
    config = llama_config(
        SHAPES.get(args.model, args.model), vocab_size=256 if args.smoke else 32_000, max_seq_len=args.seq_len
    )
    model = build_llama(config, seed=0, dtype=torch.bfloat16, device=DEVICE)
    optimizer, accelerated = build(model), DEVICE != "cpu"
    ids = torch.randint(256, (batch_size, args.seq_len), device=DEVICE)
    if accelerated:
        torch.accelerator.reset_peak_memory_stats()

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        begun = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter()
        optimizer.zero_grad()
        return time.perf_counter() - start, stepped - begun

    def run(steps: int) -> tuple[float, list[tuple[float, float]]]:
        start = time.perf_counter()
        hosts = [step() for _ in range(steps)]
        if accelerated:
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / steps, hosts

    run(args.warmup)
    gc.collect()  # what imports and the model's construction left is not the steps'
    alone, hosts = zip(*(run(1) for _ in range(args.repeats // 2)), strict=True)
    together = statistics.mean(run(min(10, args.repeats))[0] for _ in range(max(1, args.repeats // 10)))
    queueing, stepping = zip(*(host for (host,) in hosts), strict=True)  # of steps that find an empty queue
    seconds = {"step_ms": together, "alone_ms": statistics.mean(alone)}
    seconds |= {"host_ms": statistics.mean(queueing), "host_step_ms": statistics.mean(stepping)}
    means = {name: value * 1e3 for name, value in seconds.items()}
    return {**means, "peak_gib": (torch.accelerator.max_memory_allocated() if accelerated else 0) / 2**30}


DEFAULTS = {
    "model": ("1m", "1b, intermediate size 5504"),
    "batch_size": ([1], [8, 16]),
    "seq_len": (16, 1024),
    "repeats": (2, 20),  # best a multiple of 10
    "warmup": (1, 10),  # the first eight forwards look for changes that tensor versions do not show
}


def main() -> None:
    args = parse(__doc__, DEFAULTS)
    rows = list[dict[str, Any]]()
    for batch_size in args.batch_size:
        run = {"model": args.model, "batch_size": batch_size, "seq_len": args.seq_len}
        for name, build in CONTESTANTS.items():
            row = {"optimizer": name, **measure(build, batch_size, args)}
            row["tokens_per_s"] = batch_size * args.seq_len / row["step_ms"] * 1e3
            adamw_ms = row["step_ms"] if name == ADAMW else rows[-1]["step_ms"] * rows[-1]["times_adamw"]
            row["times_adamw"] = adamw_ms / row["step_ms"]
            rows.append(row | run)
            print(f"{name}, {batch_size} sequences: {row['times_adamw']:.2f} times AdamW", flush=True)
            result = pd.DataFrame(rows).assign(**machine())  # after each: the suite's time may end
            result.to_csv(args.out / "train_step.csv", index=False, float_format="%.5g")
            if DEVICE != "cpu":
                torch.accelerator.empty_cache()
    print(f"written to {args.out / 'train_step.csv'}")


if __name__ == "__main__":
    main()
