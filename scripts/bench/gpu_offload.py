"""Training steps of a LLaMA of 3 billion parameters with the optimizer's state on the host: ours and the rivals'.

    python scripts/bench/gpu_offload.py --out benchmarks/gpu     # the suite gives it 150 seconds
    python scripts/bench/gpu_offload.py --smoke                  # tiny, on the tests' stand-in, times meaningless

Each contestant trains a model of its own from the same weights on the same tokens, in bfloat16 with checkpointing.
Converted layers have r = q = n/8. The table gives the median step, the peak of allocated memory and the throughput.
``clipped`` says whether the gradient was clipped: torchao's optimizer does not support it. ``note`` says why a
contestant has no numbers. offload_machine.csv has the rates of link, host and device that ``Machine.measure`` finds.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read when torch is imported

import torch

sys.path.append(str(Path(__file__).parent / "kernels"))
from contest import DEVICE, Contestant, Step, deepspeed_step, loop, run, store
from harness import parse

import grass
from grass.machine.rates import Machine
from grass.memory.llama import LlamaShape
from grass.offload.__main__ import describe

SHAPE = LlamaShape(3200, 8640, 26, 32)
RANK = 1 / 8


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
    return deepspeed_step(model, {"stage": 2})


CONTESTANTS = {
    "Grass compact, offloaded": Contestant(grass_compact),
    "AdamW, offloaded by grass": Contestant(grass_adamw),
    "AdamW, torchao CPUOffloadOptimizer": Contestant(torchao_offload, clipped=False, needs="torchao"),
    "AdamW, DeepSpeed ZeRO-Offload": Contestant(zero_offload, needs="deepspeed"),
}


def main() -> None:
    args = parse(__doc__, {"batch_size": (1, 4), "seq_len": (16, 2048), "repeats": (2, 8), "warmup": (1, 3)})
    rates = Machine.measure(DEVICE)
    print(describe(rates), flush=True)
    store([asdict(rates)], args.out / "offload_machine.csv")
    run(CONTESTANTS, SHAPE, args, args.out / "offload.csv")


if __name__ == "__main__":
    main()
