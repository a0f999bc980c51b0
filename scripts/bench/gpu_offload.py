"""Training steps of a LLaMA of 3 billion parameters with the optimizer's state on the host: ours and the rivals'.

    python scripts/bench/gpu_offload.py --out benchmarks/gpu     # the suite gives it 150 seconds
    python scripts/bench/gpu_offload.py --smoke                  # a tiny model, a CPU as the device, times meaningless

Each contestant trains a model of its own from the same weights on the same tokens, in bfloat16 with checkpointing. The
table gives the median step, the peak of allocated memory and the throughput. ``clipped`` says whether the gradient was
clipped: torchao's optimizer does not support it. ``note`` says why a contestant has no numbers. offload_machine.csv has
the rates of link, host and device that ``Machine.measure`` finds first.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read when torch is imported

import pandas as pd
import torch
from torch import nn

sys.path.append(str(Path(__file__).parent / "kernels"))
from harness import DEVICE, machine, parse

import grass
from grass.memory.llama import LlamaShape, llama_config
from grass.offload.__main__ import describe
from grass.offload.machine import Machine
from grass.training.run.models import build_llama

SHAPE, TINY = LlamaShape(3200, 8640, 26, 32), LlamaShape(64, 172, 2, 4)
RANK = 1 / 8
Step = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Contestant:
    """Makes the training step of a model.

    Attributes:
        build: of the model.
        clipped: whether its gradient is clipped.
        needs: the module that it needs; empty if none.
    """

    build: Callable[[Any], Step]
    clipped: bool = True
    needs: str = ""


def loop(model: Any, optimizer: Any, *, clipped: bool = True) -> Step:
    """The ordinary loop."""

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def grass_compact(model: Any) -> Step:
    grass.compact(model, rank=RANK, dtype=torch.float32)
    return loop(model, grass.GrassAdamW(model, lr=1e-4, offload="cpu"))


def grass_adamw(model: Any) -> Step:
    return loop(model, grass.GrassAdamW(model.parameters(), lr=1e-4, offload="cpu"))


def torchao_offload(model: Any) -> Step:
    from torchao.optim import CPUOffloadOptimizer

    options = {"offload_gradients": False, "fused": True, "lr": 1e-4}
    return loop(model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **options), clipped=False)


def zero_offload(model: Any) -> Step:
    """ZeRO-Offload of DeepSpeed, stage 2 on one process."""
    import deepspeed

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return step


CONTESTANTS = {
    "Grass compact, offloaded": Contestant(grass_compact),
    "AdamW, offloaded by grass": Contestant(grass_adamw),
    "AdamW, torchao CPUOffloadOptimizer": Contestant(torchao_offload, clipped=False, needs="torchao"),
    "AdamW, DeepSpeed ZeRO-Offload": Contestant(zero_offload, needs="deepspeed"),
}


def compete(contestant: Contestant, args: argparse.Namespace, ids: torch.Tensor) -> dict[str, object]:
    """Its row: numbers, or a note."""
    row: dict[str, object] = {"clipped": contestant.clipped, "note": ""}
    if contestant.needs and DEVICE == "cpu":
        return row | {"note": "needs CUDA"}
    if contestant.needs and importlib.util.find_spec(contestant.needs) is None:
        return row | {"note": "not installed"}
    try:
        return row | measure(contestant, args, ids)
    except Exception as error:  # a rival that does not build here, or does not fit
        if not contestant.needs:
            raise
        return row | {"note": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    finally:
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def measure(contestant: Contestant, args: argparse.Namespace, ids: torch.Tensor) -> dict[str, object]:
    """Median milliseconds and peak memory of steps that follow one another."""
    vocabulary, cuda = 256 if args.smoke else 32_000, DEVICE == "cuda"
    config = llama_config(TINY if args.smoke else SHAPE, vocab_size=vocabulary, max_seq_len=args.seq_len)
    model = build_llama(config, seed=0, dtype=torch.bfloat16, device=DEVICE, checkpointing=True)
    model.train()
    step, times = contestant.build(model), []
    for number in range(args.warmup + args.repeats):
        if cuda and number == args.warmup:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step(ids)
        if cuda:
            torch.cuda.synchronize()  # of the device: what the host still does goes on
        times.append(time.perf_counter() - start)
    milliseconds = statistics.median(times[args.warmup :]) * 1e3
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"step_ms": milliseconds, "peak_gib": peak / 2**30, "tokens_per_s": ids.numel() / milliseconds * 1e3}


def main() -> None:
    args = parse(__doc__, {"batch_size": (1, 4), "seq_len": (16, 2048), "repeats": (2, 8), "warmup": (1, 3)})
    rates = Machine.measure(DEVICE)
    print(describe(rates), flush=True)
    store([asdict(rates)], args.out / "offload_machine.csv")
    torch.manual_seed(0)
    ids = torch.randint(256, (args.batch_size, args.seq_len), device=DEVICE)
    run = {"batch_size": args.batch_size, "seq_len": args.seq_len, "rank": RANK}
    rows: list[dict[str, object]] = []
    for name, contestant in CONTESTANTS.items():
        rows.append({"contestant": name, **compete(contestant, args, ids), **run})
        print(f"{name}: {rows[-1]['note'] or format(rows[-1]['step_ms'], '.0f') + ' ms'}", flush=True)
        store(rows, args.out / "offload.csv")  # after each: the suite's time may end


def store(rows: list[dict[str, object]], path: Path) -> None:
    """Write rows with GPU, versions and commit."""
    pd.DataFrame(rows).assign(**machine()).to_csv(path, index=False, float_format="%.5g")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
