"""What the benchmarks of offload and streaming share: contestants, ours and rivals', and what is measured of them."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from harness import machine, step_device
from torch import nn

from grass.memory.llama import LlamaShape, llama_config

sys.path.append(str(Path(__file__).parents[2]))
from training.run.models import build_llama

DEVICE = step_device()
TINY = LlamaShape(64, 172, 4, 4)
"""The model of a smoke run."""
Step = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Contestant:
    """Makes the training step of a model.

    Attributes:
        build: of the model.
        clipped: whether its gradient is clipped.
        needs: the module that it needs; empty if none.
        on_host: whether the model is built on the host.
        shape: another one than that of the table.
        fills: allocate the model without drawing its values: all are 1e-3, which takes less time.
    """

    build: Callable[[Any], Step]
    clipped: bool = True
    needs: str = ""
    on_host: bool = False
    shape: LlamaShape | None = None
    fills: bool = False


def loop(model: Any, optimizer: Any, *, clipped: bool = True) -> Step:
    """The ordinary loop."""

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compete(contestant: Contestant, shape: LlamaShape, args: argparse.Namespace, ids: torch.Tensor) -> dict[str, Any]:
    """The contestant's row: numbers, or a note."""
    row: dict[str, Any] = {"clipped": contestant.clipped, "note": ""}
    if contestant.needs and DEVICE != "cuda":
        return row | {"note": "needs CUDA"}
    if contestant.needs and importlib.util.find_spec(contestant.needs) is None:
        return row | {"note": "not installed"}
    try:
        return row | measure(contestant, shape, args, ids)
    except Exception as error:  # a rival that does not build here, or does not fit
        if not contestant.needs:
            raise
        return row | {"note": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    finally:
        gc.collect()
        if DEVICE != "cpu":
            torch.accelerator.empty_cache()


def measure(contestant: Contestant, shape: LlamaShape, args: argparse.Namespace, ids: torch.Tensor) -> dict[str, Any]:
    """Median milliseconds and peak memory of steps that follow one another."""
    accelerated, times = DEVICE != "cpu", list[float]()
    step = contestant.build(model_for(contestant, shape, args))
    for number in range(args.warmup + args.repeats):
        if accelerated and number == args.warmup:
            torch.accelerator.reset_peak_memory_stats()
        start = time.perf_counter()
        step(ids)
        if accelerated:
            torch.accelerator.synchronize()  # of the device: what the host still does goes on
        times.append(time.perf_counter() - start)
    milliseconds = statistics.median(times[args.warmup :]) * 1e3
    peak = torch.accelerator.max_memory_allocated() if accelerated else 0
    return {"step_ms": milliseconds, "peak_gib": peak / 2**30, "tokens_per_s": ids.numel() / milliseconds * 1e3}


def model_for(contestant: Contestant, shape: LlamaShape, args: argparse.Namespace) -> Any:
    """A model of the shape in bfloat16, in training mode, with checkpointing."""
    shape = TINY if args.smoke else contestant.shape or shape
    config = llama_config(shape, vocab_size=256 if args.smoke else 32_000, max_seq_len=args.seq_len)
    device = "cpu" if contestant.on_host else DEVICE
    made = "meta" if contestant.fills else device
    model: Any = build_llama(config, seed=0, dtype=torch.bfloat16, device=made, checkpointing=not contestant.on_host)
    if contestant.fills:
        model.to_empty(device=device)
        model.model.rotary_emb.__init__(config)  # its tables are no values that a checkpoint would have
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1e-3)
    return model.train()


def deepspeed_step(model: Any, zero: dict[str, Any]) -> Step:
    """The step of DeepSpeed's engine with AdamW, on one process."""
    import deepspeed

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return step


def run(contestants: dict[str, Contestant], shape: LlamaShape, args: argparse.Namespace, path: Path) -> None:
    """Measure all contestants and write a row for each as soon as it is known: the suite's time may end."""
    torch.manual_seed(0)
    ids = torch.randint(256, (args.batch_size, args.seq_len), device=DEVICE)
    rows: list[dict[str, object]] = []
    for name, contestant in contestants.items():
        row = compete(contestant, shape, args, ids)
        rows.append({"contestant": name, **row, "batch_size": args.batch_size, "seq_len": args.seq_len})
        print(f"{name}: {row['note'] or format(row['step_ms'], '.0f') + ' ms'}", flush=True)
        store(rows, path)


def store(rows: list[dict[str, object]], path: Path) -> None:
    """Write rows with GPU, versions and commit."""
    pd.DataFrame(rows).assign(**machine()).to_csv(path, index=False, float_format="%.5g")
    print(f"written to {path}")
