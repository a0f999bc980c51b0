"""Train on ranks of unlike speed: a batch dealt by speed against the same batch split evenly, in turn, in one run.

    python scripts/bench/uneven.py               # five minutes, speeds 3:1, 2:1:1 and 2:2:1
    python scripts/bench/uneven.py --rounds 1 --sample 0.005
    python scripts/bench/uneven.py --half-core   # two ranks that compute, the second on half a core

The ranks are gloo processes of this machine that stand in for devices: beside a tiny computation, each sleeps for as
long as a device of its speed would take (``--sample`` seconds for a sample on the fastest, and a tenth of that for each
micro-batch). ``seconds`` is the median step, ``predicted`` the division's own prediction, ``busy_i`` the median time
that rank ``i`` computes in a step; the rest it waits. ``sent`` are bytes that rank 0 hands to collectives in a step.

With ``--half-core``, nothing sleeps: each rank is pinned to a core, and a control group of Linux, which only root may
make, stops the second rank for 5 of every 10 ms. The model is wider then. ``load`` is that of the machine before the
run: other programs spoil such a run.

``bias`` is the relative error of the gradient on one batch of ragged sequences. Ranks whose losses are means over their
own tokens get it even with equal sizes; a loss divided by the tokens of all ranks has none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.distributed.traffic import recorded_traffic
from grass.distributed.uneven import Deal
from grass.labels import IGNORED, next_tokens
from grass.machine.division import predicted

SPEEDS = ((3, 1), (2, 1, 1), (2, 2, 1))
BATCH = {2: 16, 3: 24}
"""Samples of a step, by the number of ranks."""
STEPS = 2
"""Steps of a round."""
VOCABULARY, TOKENS, HIDDEN = 64, 8, 32
WIDER = {"TOKENS": 256, "HIDDEN": 256}
"""Sizes with ``--half-core``: a sample takes some 20 ms on a core."""
MEAN = "Grass, sizes by hand, mean loss"


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.down(functional.gelu(self.up(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    ends = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
    return nn.Sequential(ends[0], Block(), Block(), ends[1])


def samples(count: int) -> Tensor:
    """Labels; those before a sequence's first target are ignored, and the tokens are their own inputs."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (count, TOKENS), generator=generator)
    first = torch.randint(1, TOKENS - 1, (count, 1), generator=generator)
    return torch.where(torch.arange(TOKENS) < first, IGNORED, ids)


class Device:
    """A stand-in for a device: it sleeps as long as computing would take."""

    def __init__(self, speed: float, sample: float) -> None:
        self.per_sample, self.per_batch = sample / speed, sample / 10 / speed
        self.busy = 0.0

    @contextmanager
    def computes(self, size: int) -> Iterator[None]:
        """Compute so many samples."""
        start = time.perf_counter()
        time.sleep(self.per_batch + self.per_sample * size)
        self.busy += time.perf_counter() - start  # what follows is tiny, and DDP's forward waits for other ranks
        yield


class HalfCore(Device):
    """A core of this machine for each rank, of which the second rank gets half."""

    def __init__(self, rank: int) -> None:
        super().__init__(1.0, 0.0)
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        if rank:
            halve(os.getpid())

    @contextmanager
    def computes(self, size: int) -> Iterator[None]:
        """The model itself computes."""
        yield


PERIOD = 10_000
"""Microseconds, of which a process on half a core runs the half."""


def quota(process: int) -> Path:
    """The control group of a process on half a core."""
    first = Path("/sys/fs/cgroup/cpu")
    return (first if first.exists() else first.parent) / f"half-core-{process}"


def halve(process: int) -> None:
    """Let the kernel stop a process for half of each period. Only root may do so."""
    group = quota(process)
    group.mkdir()
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(PERIOD // 2))
    else:
        (group / "cpu.max").write_text(f"{PERIOD // 2} {PERIOD}")
    (group / "cgroup.procs").write_text(str(process))


class Contestant:
    """A model, its optimizer, and how it deals its batch."""

    def __init__(self, name: str, device: Device, deal: Deal) -> None:
        self.name, self.device, self.deal = name, device, deal
        own = model()
        if name.startswith("Grass"):
            grass.compact(own, rank=0.125)
        if "FSDP2" in name:
            for block in own[1:3]:
                fully_shard(block)
            fully_shard(own)
        is_grass = name.startswith("Grass")
        self.optimizer = grass.GrassAdamW(own) if is_grass else torch.optim.AdamW(own.parameters())
        self.model = own if "FSDP2" in name else DistributedDataParallel(own)
        self.times: list[float] = []
        self.busy: list[float] = []

    def backward(self, labels: Tensor) -> None:
        """Forward and backward of this rank's share of a batch."""
        division, rank = self.deal.division, self.deal.rank
        every = labels.split(list(division.sizes) * division.micro_batches)
        rounds = [{"labels": part} for part in every[rank :: len(division.sizes)]]
        items = self.deal.items(rounds)
        for k, batch in enumerate(rounds):
            with self.deal.synced(self.model, k):
                with self.device.computes(len(batch["labels"])):
                    logits = self.model(batch["labels"].clamp(min=0))
                    reduction = "mean" if self.name == MEAN else "sum"
                    targets = next_tokens(batch["labels"])
                    loss = functional.cross_entropy(logits.mT, targets, reduction=reduction)
                (loss / (len(rounds) if self.name == MEAN else items)).backward()

    def round(self, labels: Tensor) -> None:
        """Time some steps."""
        self.device.busy = 0.0
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step(labels)
        self.times.append((time.perf_counter() - start) / STEPS)
        self.busy.append(self.device.busy / STEPS)

    def step(self, labels: Tensor) -> None:
        """Train one step."""
        self.backward(labels)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measured(device: Device, batch: int) -> Deal:
    """The division that the ranks measure, as they will train."""
    own = model()
    grass.compact(own, rank=0.125)
    ddp, labels = DistributedDataParallel(own), samples(batch)

    def work(size: int) -> None:
        with ddp.no_sync(), device.computes(size):
            ddp(labels[:size].clamp(min=0)).square().mean().backward()

    return grass.distributed.deal(work, batch, device="cpu")


def bias(contestant: Contestant, labels: Tensor) -> float:
    """The relative error of the first gradient against that of one process with the whole batch."""
    if "FSDP2" in contestant.name:
        return float("nan")
    alone = model()
    if contestant.name.startswith("Grass"):
        grass.compact(alone, rank=0.125)
        grass.GrassAdamW(alone)
    logits = alone(labels.clamp(min=0))
    functional.cross_entropy(logits.mT, next_tokens(labels)).backward()
    contestant.backward(labels)
    ours, theirs = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (contestant.model, alone)
    )
    contestant.optimizer.zero_grad()
    return float((ours - theirs).norm() / theirs.norm())


def device_of(rank: int, speeds: tuple[int, ...], args: argparse.Namespace) -> Device:
    """What this rank computes on."""
    if not args.half_core:
        return Device(speeds[rank] / max(speeds), args.sample)
    globals().update(WIDER)
    return HalfCore(rank)


def worker(rank: int, store: str, path: str, speeds: tuple[int, ...], args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(speeds))
    batch, device = BATCH[len(speeds)], device_of(rank, speeds, args)
    labels, dealt = samples(batch), measured(device, batch)
    even = grass.distributed.deal([batch // len(speeds)] * len(speeds), batch)
    deals = {"Grass, dealt": dealt, "Grass, even": even, "AdamW, even, DDP": even, "AdamW, even, FSDP2": even}
    hand = grass.distributed.deal(dealt.division.sizes, batch) if dealt.division.micro_batches == 1 else even
    deals[MEAN] = hand
    if args.half_core:
        deals = {name: deals[name] for name in ("Grass, dealt", "Grass, even", "AdamW, even, DDP")}
    elif len(speeds) == 2:
        for first in range(2, batch, 2):
            deals[f"Grass, {first} + {batch - first}"] = grass.distributed.deal([first, batch - first], batch)
    contestants = [Contestant(name, device, deal) for name, deal in deals.items()]
    rows = []
    for contestant in contestants:
        row = {"speeds": ":".join(map(str, speeds)), "contestant": contestant.name, "bias": bias(contestant, labels)}
        contestant.step(labels)
        with recorded_traffic() as sent:
            contestant.step(labels)
        rows.append({**row, "sent": sum(sent.values())})
    for _ in range(args.rounds):
        for contestant in contestants:
            contestant.round(labels)
    for contestant, row in zip(contestants, rows, strict=True):
        division = contestant.deal.division
        row |= {"sizes": "+".join(map(str, division.sizes)), "micro_batches": division.micro_batches}
        row |= {"seconds": median(contestant.times)}
        row["predicted"] = predicted(dealt.profiles, division.sizes, division.micro_batches).step
        busy: list[float] = [0.0] * len(speeds)
        dist.all_gather_object(busy, median(contestant.busy))
        row |= {f"busy_{i}": seconds for i, seconds in enumerate(busy)}
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run(speeds: tuple[int, ...], args: argparse.Namespace) -> pd.DataFrame:
    """One table for some speeds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        shared = os.path.join(folder, "store"), path, speeds, args
        processes = [context.Process(target=worker, args=(rank, *shared)) for rank in range(len(speeds))]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        for group in (quota(process.pid) for process in processes if process.pid):
            if group.exists():
                group.rmdir()
        if any(process.exitcode for process in processes):
            sys.exit("a rank failed")
        table = pd.DataFrame(json.loads(Path(path).read_text()))
    even = table.loc[table.contestant == "Grass, even", "seconds"].item()
    return table.assign(times_even=even / table.seconds)


def main() -> None:
    args = parse()
    load = os.getloadavg()[0]
    if args.half_core:
        result = run((2, 1), args).drop(columns=["busy_0", "busy_1"]).assign(load=load)
    else:
        result = pd.concat([run(speeds, args) for speeds in SPEEDS[: args.clusters]])
    print(result.to_string(index=False, float_format="%.3f"))
    csv = args.csv or Path(__file__).parents[2] / "benchmarks" / f"uneven{'_core' if args.half_core else ''}.csv"
    write(result, csv, rounds=args.rounds, **({} if args.half_core else {"sample": args.sample}))


def parse() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of all contestants in turn")
    parser.add_argument("--sample", type=float, default=0.04, help="seconds for a sample on the fastest device")
    parser.add_argument("--clusters", type=int, default=len(SPEEDS), help="how many of the speeds to run")
    parser.add_argument("--half-core", action="store_true", help="compute, the second rank on half a core")
    parser.add_argument("--csv", type=Path, help="default: benchmarks/uneven.csv, or uneven_core.csv")
    args = parser.parse_args()
    if args.rounds < 1 or not args.sample > 0 or not 1 <= args.clusters <= len(SPEEDS):
        parser.error(f"Invalid --rounds {args.rounds}, --sample {args.sample} or --clusters {args.clusters}")
    return args


if __name__ == "__main__":
    main()
