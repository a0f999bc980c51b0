"""What a GPU's host does in a training step: Python and operators, with kernels that do nothing.

    python scripts/bench/host_time.py          # adds the rows of this commit to benchmarks/host_time.csv
    python scripts/bench/host_time.py --smoke

A GPU waits where its host takes longer to queue a step than the GPU to run it. The model has 168 linear layers, as
LLaMA 1B, and is so small that computing takes next to no time. It lies on the CPU, where grass is told to take its
Triton kernels. Their launches are left out: on a GPU they and every operator cost some microseconds more. Forwards do
not look for changes of weights, as on a GPU after the first eight. Medians of steps after the first ten. To measure
another commit, put its package on ``PYTHONPATH``, with ``triton_kernels`` as ``grass/kernels``, and its name into
``GRASS_COMMIT``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["GRASS_KERNELS"] = "triton"

import pandas as pd
import torch
import triton

LAUNCHES = [0]


class Nothing:
    """Stands for a kernel: counts launches."""

    def __init__(self, kernel: object) -> None: ...

    def __getitem__(self, grid: object) -> Any:
        def launch(*arguments: object, **options: object) -> None:
            LAUNCHES[0] += 1

        return launch


def _nothing(kernel: Any = None, **options: Any) -> Any:
    return Nothing if kernel is None else Nothing(kernel)


triton.jit = _nothing  # before grass defines its kernels

import grass  # noqa: E402
from grass.command_line import ArgumentParser  # noqa: E402
from grass.compact_mode import layer as compact_layer  # noqa: E402
from grass.compact_mode import synced_rows  # noqa: E402
from grass.kernels import dispatch  # noqa: E402
from grass.memory.llama import LlamaShape, llama_config  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))
import provenance  # noqa: E402

from training.run.models import build_llama  # noqa: E402

dispatch.INTERPRETED, dispatch._obstacle = True, lambda tensors, types: None  # they are on the CPU
synced_rows.looks_always = compact_layer.looks_always = lambda layer: False  # as on a GPU
synced_rows.PROBES, synced_rows.SyncedRows.look_once = 0, lambda self: None  # rows are not what was not gathered


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def dense(model: Any) -> Any:
    return grass.GrassAdamW(grass.param_groups(model, rank=1 / 8), lr=1e-5)


def compact(model: Any) -> Any:
    grass.compact(model, rank=1 / 8, dtype=torch.float32)
    return grass.GrassAdamW(model, lr=1e-5)


def unexplored(model: Any) -> Any:
    grass.compact(model, rank=1 / 4, explore=0, dtype=torch.float32)
    return grass.GrassAdamW(model, lr=1e-5)


def recipe(model: Any) -> Any:
    grass.compact(model, rank=1 / 8, explore=1 / 32)
    return grass.GrassAdamW(model, lr=1e-5, moment_dtype="8bit", stochastic_rounding=True)


CONTESTANTS = {
    "adamw fused": adamw,
    "grass dense": dense,
    "grass compact": compact,
    "grass compact, r=1/4, nothing explored": unexplored,
    "grass compact, bfloat16 rows, 8-bit moments": recipe,
}


def measure(build: Any, layers: int, steps: int, warmup: int) -> dict[str, float]:
    """Median milliseconds of forward, backward and ``step()``, and the launches of a step."""
    config = llama_config(LlamaShape(64, 160, layers, 4), vocab_size=256, max_seq_len=32)
    model: Any = build_llama(config, seed=0, dtype=torch.bfloat16)
    optimizer, ids, rows = build(model), torch.randint(256, (1, 16)), []
    for _ in range(warmup + steps):
        LAUNCHES[0], times = 0, [time.perf_counter()]
        loss = model(input_ids=ids, labels=ids).loss
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        for p in model.parameters():
            if p.grad is not None:
                p.grad.nan_to_num_(0, 0, 0)  # what kernels that do nothing leave
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        optimizer.zero_grad()
        rows.append([times[1] - times[0], times[2] - times[1], times[4] - times[3], LAUNCHES[0] / 1e3])
    names = ("forward_ms", "backward_ms", "step_ms", "launches")
    columns = list(zip(*rows[warmup:], strict=True))
    return {name: statistics.median(column) * 1e3 for name, column in zip(names, columns, strict=True)}


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/host_time.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (1, 2, 1) if args.smoke else (24, 20, 10)
    rows = [{"optimizer": name, **measure(build, *sizes)} for name, build in CONTESTANTS.items()]
    table = pd.DataFrame(rows).assign(layers=sizes[0])
    provenance.write(table, args.out.with_suffix(".new"))
    new = pd.read_csv(args.out.with_suffix(".new"), dtype=str)
    args.out.with_suffix(".new").unlink()
    if args.out.exists():
        old = pd.read_csv(args.out, dtype=str)
        new = pd.concat([old[old["commit"] != new["commit"][0]], new])
    new.to_csv(args.out, index=False)
    print(new.to_string(index=False))


if __name__ == "__main__":
    main()
