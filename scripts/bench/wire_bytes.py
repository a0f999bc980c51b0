"""Bytes that data-parallel training communicates and holds: DDP AdamW, DDP + GaLore, Grass dense and compact.

    python scripts/bench/wire_bytes.py                      # a LLaMA of 60m's width, 2 layers, 2 gloo processes
    python scripts/bench/wire_bytes.py --hidden 64 --intermediate 172 --ranks 0.25

Counted, by torch's profiler: the bytes that a rank hands to its collectives in an ordinary step and in one that
refreshes. A row of the table weights the two by the interval. ``gradients_mb`` is the most memory that gradients and
DDP's buckets take in backward: the peak of everything allocated, less parameters and optimizer state, with a batch so
small (8 tokens) that activations hardly count; without ``gradient_as_bucket_view``, DDP's default, and with. Grass
runs with its defaults except for what the row names, but in dense mode it explores as many columns as have state.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.distributed import ReducedAllreduceState, reduced_allreduce_hook
from grass.distributed.traffic import recorded_traffic
from grass.memory import state_bytes
from grass.memory.llama import LlamaShape, llama_config
from training.run.models import build_llama
from training.run.optimizers import OptimizerConfig, build_optimizer

Build = Callable[[nn.Module, float, bool], tuple[DistributedDataParallel, torch.optim.Optimizer]]
CYCLE = 4
"""Steps between refreshes here, so that a cycle shows both kinds of step."""
TOKENS = 8
"""A batch so small that its activations hardly count."""


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(count, (args, folder), nprocs=args.processes)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    result = table(rows, args.intervals)
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, processes=args.processes)


def count(process: int, args: argparse.Namespace, folder: str) -> None:
    """Count on every process; the first writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=process, world_size=args.processes)
    rows = []
    for name, build in BUILDERS.items():
        for rank in args.ranks if name != "adamw" else args.ranks[:1]:
            ordinary, refreshing = traffic(args, build, rank)
            row = {"optimizer": name, "rank": rank, "ordinary": ordinary, "refreshing": refreshing}
            for view in (False, True):
                row[f"gradients_{'view' if view else 'copy'}"] = gradient_memory(args, build, rank, view)
            rows.append(row)
    if process == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def traffic(args: argparse.Namespace, build: Build, rank: float) -> tuple[int, int]:
    """Bytes of an ordinary step and of one that refreshes: the least and the most over a cycle."""
    ddp, optimizer = build(model(args), rank, False)
    for _ in range(CYCLE):  # in which settings are compared and DDP rebuilds its buckets
        train(ddp, optimizer)
    counted = []
    for _ in range(CYCLE):
        with recorded_traffic() as counts:
            train(ddp, optimizer)
        counted.append(sum(counts.values()))
    return min(counted), max(counted)


def gradient_memory(args: argparse.Namespace, build: Build, rank: float, view: bool) -> int:
    """Peak bytes of gradients and buckets in the third step's backward."""
    gc.collect()  # DDP is part of a reference cycle: what the last one held is not to be freed in between
    with allocations() as total:
        ddp, optimizer = build(model(args), rank, view)
        for _ in range(2):
            train(ddp, optimizer)
        with torch.profiler.record_function("third backward"):
            ids = tokens()
            ddp(input_ids=ids, labels=ids).loss.backward()
    start, end = total["third backward"]
    peak = max(bytes for time, bytes, _ in total["allocated"] if start <= time <= end)
    start = total["allocated"][0]
    others = sum(p.nbytes for p in ddp.parameters()) + state_bytes(optimizer).device + state_bytes(optimizer).host
    return int(peak - (start[1] - start[2]) - others)


@contextmanager
def allocations() -> Iterator[dict[str, list]]:
    """Every change of the memory allocated in the block, and when its marked parts began and ended."""
    found: dict[str, list] = {"allocated": []}
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("name") == "[memory]":
                found["allocated"].append((event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"]))
            elif event.get("name") == "third backward":
                found["third backward"] = [event["ts"], event["ts"] + event["dur"]]
    found["allocated"].sort()


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = tokens()
    ddp(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def tokens() -> torch.Tensor:
    return torch.randint(256, (1, TOKENS))


def model(args: argparse.Namespace) -> nn.Module:
    shape = LlamaShape(args.hidden, args.intermediate, args.layers, args.hidden // 32)
    return build_llama(llama_config(shape, vocab_size=256, max_seq_len=TOKENS))


def adamw(m: nn.Module, rank: float, view: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    return DistributedDataParallel(m, gradient_as_bucket_view=view), torch.optim.AdamW(m.parameters(), fused=True)


def galore(m: nn.Module, rank: float, view: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    optimizer = build_optimizer(m, OptimizerConfig(name="galore", rank=rank, update_interval=CYCLE))
    return DistributedDataParallel(m, gradient_as_bucket_view=view), optimizer


def dense(explore: int | None, selection: str = "uniform", refresh: str = "full") -> Build:
    """The hook: as many columns explored as selected, or none."""

    def build(m: nn.Module, rank: float, view: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        options = {"explore": rank if explore is None else explore, "selection": selection, "update_interval": CYCLE}
        optimizer = grass.GrassAdamW(grass.param_groups(m, rank, **options))
        ddp = DistributedDataParallel(m, gradient_as_bucket_view=view)
        ddp.register_comm_hook(ReducedAllreduceState(optimizer, refresh=refresh), reduced_allreduce_hook)
        return ddp, optimizer

    return build


def compact(explore: int | None, **options: object) -> Build:
    """As many columns explored as selected, or none."""

    def build(m: nn.Module, rank: float, view: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        grass.compact(m, rank=rank, explore=explore)
        optimizer = grass.GrassAdamW(m, update_interval=CYCLE, **options)
        return DistributedDataParallel(m, gradient_as_bucket_view=view), optimizer

    return build


BUILDERS: dict[str, Build] = {
    "adamw": adamw,
    "galore": galore,
    "grass compact": compact(None),
    "grass compact, nothing explored": compact(0),
    "grass compact, top_r": compact(None, selection="top_r"),
    "grass dense, hook": dense(None),
    "grass dense, hook, nothing explored": dense(0),
    "grass dense, hook, top_r, full refresh": dense(None, "top_r"),
    "grass dense, hook, top_r, sketched refresh": dense(None, "top_r", "sketch"),
}


def table(rows: list[dict], intervals: list[int]) -> pd.DataFrame:
    adamw = rows[0]["ordinary"]
    return pd.DataFrame(
        {
            "optimizer": row["optimizer"],
            "rank": row["rank"],
            "interval": interval,
            "mb_per_step": (row["ordinary"] + (row["refreshing"] - row["ordinary"]) / interval) / 1e6,
            "of_adamw": (row["ordinary"] + (row["refreshing"] - row["ordinary"]) / interval) / adamw,
            "ordinary_mb": row["ordinary"] / 1e6,
            "refresh_mb": row["refreshing"] / 1e6,
            "gradients_mb": row["gradients_copy"] / 1e6,
            "gradients_view_mb": row["gradients_view"] / 1e6,
        }
        for row in rows
        for interval in intervals
    )


def parse() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1376)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ranks", type=float, nargs="+", default=[1 / 4, 1 / 8, 1 / 16])
    parser.add_argument("--intervals", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--csv", type=Path, default=Path("runs/wire_bytes.csv"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
