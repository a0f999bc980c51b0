"""Training steps of a LLaMA of 8 billion parameters in 24 GB of device memory: streamed by grass and by rivals.

    python scripts/bench/gpu_streaming.py --out benchmarks/gpu   # the suite gives it 150 seconds
    python scripts/bench/gpu_streaming.py --smoke                # tiny, on the tests' stand-in, times meaningless

Each contestant trains a model of its own in bfloat16 on the same tokens, with clipping. Converted layers have r = q =
n/8. The process may allocate 24 GB. The last row is a model of 34 billion parameters, whose values are constants.
``note`` says why a contestant has no numbers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read when torch is imported

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent / "kernels"))
from contest import DEVICE, Contestant, Step, deepspeed_step, loop, run
from harness import parse

import grass
from grass.memory.llama import LlamaShape

SHAPE, LARGE = LlamaShape(4096, 14336, 32, 32, 8), LlamaShape(8192, 22016, 48, 64, 8)
BUDGET = 24e9
"""Bytes of device memory."""


def streamed(rank: float, active: torch.dtype) -> Any:
    def build(model: Any) -> Step:
        grass.compact(model, rank=rank, dtype=active)
        optimizer = grass.GrassAdamW(model, lr=1e-4, offload="cpu")
        grass.stream(model, DEVICE, offload_activations=True)
        return loop(model, optimizer)

    return build


def streamed_adamw(model: Any) -> Step:
    optimizer = grass.GrassAdamW(model.parameters(), lr=1e-4, offload="cpu")
    grass.stream(model, DEVICE, offload_activations=True)
    return loop(model, optimizer)


def fsdp(model: Any) -> Step:
    """FSDP2 with CPUOffloadPolicy on one process, and fused AdamW on the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from training.run.models import enable_checkpointing

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    enable_checkpointing(model)
    for part in (*model.model.layers, model):
        fully_shard(part, offload_policy=CPUOffloadPolicy())
    return loop(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def zero3(model: Any) -> Step:
    return deepspeed_step(model, {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}})


CONTESTANTS = {
    "Grass compact, streamed": Contestant(streamed(1 / 8, torch.float32), on_host=True, fills=True),
    "AdamW, streamed by grass": Contestant(streamed_adamw, on_host=True, fills=True),
    "AdamW, FSDP2 CPUOffloadPolicy": Contestant(fsdp, needs="torch", on_host=True, fills=True),
    "AdamW, DeepSpeed ZeRO-3": Contestant(zero3, needs="deepspeed", on_host=True, fills=True),
    "34B, Grass compact, streamed": Contestant(streamed(1 / 32, torch.bfloat16), on_host=True, fills=True, shape=LARGE),
}


def main() -> None:
    args = parse(__doc__, {"batch_size": (1, 4), "seq_len": (16, 2048), "repeats": (2, 3), "warmup": (1, 2)})
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(BUDGET / torch.cuda.get_device_properties(0).total_memory)
    run(CONTESTANTS, SHAPE, args, args.out / "streaming.csv")


if __name__ == "__main__":
    main()
