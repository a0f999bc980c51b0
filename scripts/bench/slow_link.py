"""Train on 2 workers over a slowed link: DDP AdamW against Grass, in turn, in one run.

    sudo python scripts/bench/slow_link.py                # a LLaMA of 350m's width, 2 layers, a minute or two
    sudo python scripts/bench/slow_link.py --hidden 128 --intermediate 352 --seq-len 32 --rounds 1

Each worker lives in a network namespace of its own; a pair of virtual interfaces joins them, and ``tc`` limits the rate
of both. The script makes and removes all of it, for which it needs the right to (Linux, CAP_NET_ADMIN and
CAP_SYS_ADMIN); without, it says so and ends. First every contestant's step is timed without communication
(``compute_s``), and the bytes that AdamW's all-reduce sends are read from the interface's own counter. The link is
then slowed until these bytes alone take as long as AdamW's step (``slowdown`` 1), and three times as long (3). A
contestant's own bytes take ``link_s``; ``hidden`` is the share of that which passes beside its computation, so that
``seconds`` is ``compute_s + (1 - hidden) link_s``. Grass's ten steps hold one refresh.

All have DDP buckets of 1 MB, so that the all-reduce begins early in backward; AdamW also has torch's default of 25 MB,
and ``times_adamw`` is against the faster of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.distributed import ReducedAllreduceState, reduced_allreduce_hook
from grass.memory.llama import LlamaShape, llama_config
from training.run.models import build_llama

INTERVAL = 10
SLOWDOWNS = (1.0, 3.0)
ADAMW = ("adamw", "adamw, buckets of 25 MB")

Trained = tuple[nn.Module, torch.optim.Optimizer]
Build = Callable[[nn.Module], Trained]


def main() -> None:
    args = parse()
    if args.worker is not None:
        work(args)
        return
    race(two_namespaces(), partial(start_worker, __file__, "10.77.0.1:29511"), table, args.csv)


Start = Callable[[str, int, Path], "subprocess.Popen[bytes]"]
"""Starts a worker: its namespace, its rank, and where it writes its times."""


def race(
    joined: AbstractContextManager[list[str]], start: Start, table: Callable[[dict], pd.DataFrame], csv: Path
) -> None:
    """Start a worker in each namespace, wait for all, and write the table of their times."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # an exit that cleans up
    with joined as namespaces, tempfile.TemporaryDirectory() as folder:
        if not namespaces:
            print("Skipped: network namespaces cannot be made here")
            return
        path = Path(folder) / "times.json"
        workers = [start(name, rank, path) for rank, name in enumerate(namespaces)]
        try:
            if any([worker.wait() for worker in workers]):
                sys.exit("a worker failed")
        finally:
            for worker in workers:
                worker.kill()
        result = table(json.loads(path.read_text()))
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, csv)


def two_namespaces() -> AbstractContextManager[list[str]]:
    """Two joined network namespaces, or none where that is not permitted; removed afterwards."""
    return namespaces([f"grass-{os.getpid()}-{end}" for end in "ab"], join)


@contextmanager
def namespaces(names: list[str], join: Callable[[list[str]], None], links: Sequence[str] = ()) -> Iterator[list[str]]:
    """What ``join`` makes: namespaces and links between them, or nothing where that is not permitted."""
    try:
        try:
            join(names)
        except (OSError, subprocess.CalledProcessError):  # no such tool, no right to use it
            yield []
        else:
            yield names
    finally:
        if shutil.which("ip"):
            for kind, name in (*(("netns", name) for name in names), *(("link", name) for name in links)):
                subprocess.run(["ip", kind, "del", name], stderr=subprocess.DEVNULL, check=False)


def join(names: list[str]) -> None:
    """Make the namespaces and a pair of interfaces between them, whose rate can be limited."""
    for name in names:
        command("ip", "netns", "add", name)
    ends = [("link0", "netns", name) for name in names]
    command("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    for number, name in enumerate(names, start=1):
        command("ip", "-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "link0")
        for device in ("lo", "link0"):
            command("ip", "-n", name, "link", "set", device, "up")
        limit_rate(1e9, "-n", name)
        command("tc", "-n", name, "qdisc", "del", "dev", "link0", "root")


def command(*words: str) -> None:
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)


def start_worker(script: str, address: str, namespace: str, rank: int, path: Path) -> subprocess.Popen[bytes]:
    host, port = address.split(":")
    rest = [*sys.argv[1:], "--worker", str(rank), "--times", str(path)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "link0", "MASTER_ADDR": host, "MASTER_PORT": port}
    return subprocess.Popen(["ip", "netns", "exec", namespace, sys.executable, script, *rest], env=environment)


def work(args: argparse.Namespace) -> None:
    """One worker: calibrate, slow the link, time the contestants in turn."""
    dist.init_process_group("gloo", rank=args.worker, world_size=2)
    torch.manual_seed(args.worker)
    ids = torch.randint(256, (args.batch_size, args.seq_len))
    contestants = {name: Contestant(build, args, ids) for name, build in builders(args).items()}
    for contestant in contestants.values():
        for _ in range(3):  # states and rows are made, DDP rebuilds its buckets
            contestant.step()
    compute = compute_seconds(contestants)
    sent = bytes_of_a_step(contestants["adamw"])
    rows = []
    for slowdown in SLOWDOWNS:
        rate = sent / compute["adamw"] / slowdown
        limit_rate(rate)
        for _ in range(args.rounds):
            for name, contestant in contestants.items():
                seconds, count = contestant.timed(2 if name in ADAMW else INTERVAL)
                row = {"seconds": seconds, "compute_s": compute[name], "link_s": count / rate, "sent_mb": count / 1e6}
                rows.append({"slowdown": slowdown, "optimizer": name, "link_mbit_s": rate * 8e-6, **row})
    if args.worker == 0:
        args.times.write_text(json.dumps({"tokens": 2 * ids.numel(), "rows": rows}))
    dist.barrier()


class Contestant:
    """A replica under DDP, its optimizer and its batch."""

    def __init__(self, build: Build, args: argparse.Namespace, ids: Tensor) -> None:
        self.ids = ids
        self.ddp, self.optimizer = build(model(args))

    def step(self, synchronise: bool = True) -> None:
        """One training step."""
        if synchronise:
            self.ddp(input_ids=self.ids, labels=self.ids).loss.backward()
        else:
            with self.ddp.no_sync():
                self.ddp(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, steps: int, synchronise: bool = True) -> tuple[float, float]:
        """Seconds, and bytes that left this worker, per step."""
        dist.barrier()
        start, before = time.perf_counter(), sent_bytes()
        for _ in range(steps):
            self.step(synchronise)
        dist.barrier()
        return (time.perf_counter() - start) / steps, (sent_bytes() - before) / steps


def model(args: argparse.Namespace) -> nn.Module:
    shape = LlamaShape(args.hidden, args.intermediate, args.layers, args.hidden // 64)
    return build_llama(llama_config(shape, vocab_size=256, max_seq_len=args.seq_len))


def builders(args: argparse.Namespace) -> dict[str, Build]:
    options = {"lr": 1e-3, "update_interval": INTERVAL}

    def adamw(m: nn.Module) -> Trained:
        return ddp(m), torch.optim.AdamW(m.parameters(), fused=True)

    def adamw_default(m: nn.Module) -> Trained:
        return ddp(m, bucket_cap_mb=25), torch.optim.AdamW(m.parameters(), fused=True)

    def compact(m: nn.Module) -> Trained:
        grass.compact(m, rank=args.rank)
        return ddp(m), grass.GrassAdamW(m, fused=True, **options)

    def dense(m: nn.Module) -> Trained:
        options_dense = {**options, "dim": 0, "explore": args.rank}
        optimizer = grass.GrassAdamW(grass.param_groups(m, args.rank, **options_dense), fused=True)
        wrapped = ddp(m)
        wrapped.register_comm_hook(ReducedAllreduceState(optimizer, refresh="sketch"), reduced_allreduce_hook)
        return wrapped, optimizer

    return {
        **dict(zip(ADAMW, (adamw, adamw_default), strict=True)),
        "grass compact": compact,
        "grass dense dim=0, hook": dense,
    }


def ddp(m: nn.Module, bucket_cap_mb: float = 1) -> DistributedDataParallel:
    return DistributedDataParallel(m, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)


def compute_seconds(contestants: dict[str, Contestant]) -> dict[str, float]:
    """Each one's seconds of a step that does not communicate, on the slower worker.

    It leaves the replicas apart, which changes nothing that is timed later. None of these steps refreshes.
    """
    rounds = [{name: c.timed(2, synchronise=False)[0] for name, c in contestants.items()} for _ in range(3)]
    medians = torch.tensor([statistics.median(times[name] for times in rounds) for name in contestants])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(contestants, medians.tolist(), strict=True))


def bytes_of_a_step(contestant: Contestant) -> float:
    sent = torch.tensor(contestant.timed(2)[1])
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return float(sent)


def sent_bytes() -> int:
    return int(Path("/sys/class/net/link0/statistics/tx_bytes").read_text())


def limit_rate(rate: float, *namespace: str) -> None:
    """Limit this end of the link, or that in another namespace, to ``rate`` bytes per second."""
    limit = ("rate", f"{rate * 8:.0f}bit", "burst", f"{max(64_000, rate / 250):.0f}", "latency", "200ms")
    command("tc", *namespace, "qdisc", "replace", "dev", "link0", "root", "tbf", *limit)


def table(times: dict) -> pd.DataFrame:
    rows = pd.DataFrame(times["rows"]).groupby(["slowdown", "optimizer"], sort=False).median().reset_index()
    fastest = rows[rows.optimizer.isin(ADAMW)].groupby("slowdown").seconds.min()
    return rows.assign(
        hidden=(rows.compute_s + rows.link_s - rows.seconds) / rows.link_s,
        tokens_per_s=times["tokens"] / rows.seconds,
        times_adamw=rows.slowdown.map(fastest) / rows.seconds,
    )


def parse() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2736)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2, help="per worker")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rank", type=float, default=1 / 8, help="share with state; as many are explored")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=Path("runs/slow_link.csv"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
