"""A step of 2D tensor parallelism over a slowed link: whole gradients against compact ones, in turn, in one run.

    sudo python scripts/bench/grid_link.py             # 4 workers, a chain of linear layers, some minutes

Each of four workers lives in a network namespace of its own; a bridge joins them, and ``tc`` limits the rate at which
each sends. The rate is set so that AdamW's step waits for the link for ``--link-bound`` times as long as the four
processes compute. Gloo sums and scatters by an all-reduce, so both contestants send more than the ring's share that
``grid_costs.py`` counts; ``sent_mb`` is read from the interface.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))
from grid_costs import SHARE, Sizes, built
from slow_link import command, limit_rate, namespaces, race, sent_bytes, start_worker

import grass
from grass.command_line import ArgumentParser

CONTESTANTS = {
    "AdamW": "2D",
    "Grass": "2D, Grass",
    "Grass, cached panels": "2D, Grass, cached panels",
    "AdamW, FSDP2 x 1D": "FSDP2 x 1D",
    "Grass, FSDP2 x 1D": "FSDP2 x 1D, Grass",
    "AdamW, replicas x 1D": "Replicas x 1D",
    "Grass, replicas x 1D": "Replicas x 1D, Grass",
}
RANKS = 4


def main() -> None:
    args = parse()
    if args.worker is not None:
        work(args)
        return
    names, bridge = [f"grass-{os.getpid()}-{rank}" for rank in range(RANKS)], f"grass{os.getpid() % 100_000}"
    joined = namespaces(names, partial(join, bridge), [bridge])
    race(joined, partial(start_worker, __file__, "10.78.0.1:29512"), table, args.csv)


def join(bridge: str, names: list[str]) -> None:
    """Make the namespaces and a bridge between them."""
    command("ip", "link", "add", bridge, "type", "bridge")
    command("ip", "link", "set", bridge, "up")
    for rank, name in enumerate(names):
        outer = f"{bridge}-{rank}"
        command("ip", "netns", "add", name)
        command("ip", "link", "add", outer, "type", "veth", "peer", "name", "link0", "netns", name)
        command("ip", "link", "set", outer, "master", bridge, "up")
        command("ip", "-n", name, "address", "add", f"10.78.0.{rank + 1}/24", "dev", "link0")
        for device in ("lo", "link0"):
            command("ip", "-n", name, "link", "set", device, "up")


def work(args: argparse.Namespace) -> None:
    """One worker: measure without a limit, slow the link, time the contestants in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=args.worker, world_size=RANKS)
    sizes = Sizes(args.tokens, args.hidden, args.wide, args.pairs)
    contestants = {name: Contestant(scheme, sizes) for name, scheme in CONTESTANTS.items()}
    for contestant in contestants.values():
        contestant.timed(2)  # states, rows and cached panels are made
    seconds, sent = contestants["AdamW"].timed(2)
    rate = slowest(sent / seconds / args.link_bound)
    limit_rate(rate)
    rows = []
    for _ in range(args.rounds):
        for name, contestant in contestants.items():
            own_seconds, count = contestant.timed(2)
            rows.append({"optimizer": name, "seconds": own_seconds, "sent_mb": count / 1e6, "link_s": count / rate})
    if args.worker == 0:
        numbers = {**sizes._asdict(), "ranks": RANKS, "share": SHARE, "link_mbit_s": rate * 8e-6}
        args.times.write_text(json.dumps({"rows": rows, "numbers": numbers}))
    dist.barrier()


def slowest(value: float) -> float:
    """The smallest value of all workers."""
    smallest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return float(smallest)


class Contestant:
    """A chain of linear layers on the grid, and its optimizer."""

    def __init__(self, scheme: str, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.model, self.x = built(scheme, RANKS, sizes, torch.float32)
        whole = "Grass" not in scheme
        options: dict[str, Any] = {"lr": 1e-3, "fused": True}
        self.optimizer = (torch.optim.AdamW if whole else grass.GrassAdamW)(
            self.model.parameters() if whole else self.model, **options
        )

    def timed(self, steps: int) -> tuple[float, float]:
        """Seconds, and bytes that left this worker, per step."""
        dist.barrier()
        start, before = time.perf_counter(), sent_bytes()
        for _ in range(steps):
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        return (time.perf_counter() - start) / steps, (sent_bytes() - before) / steps


def table(times: dict[str, Any]) -> pd.DataFrame:
    """Medians by contestant, beside AdamW's step."""
    rows = pd.DataFrame(times["rows"]).groupby("optimizer", sort=False).median().reset_index()
    adamw = rows.loc[rows.optimizer == "AdamW", "seconds"].iloc[0]
    return rows.assign(times_adamw=adamw / rows.seconds, **times["numbers"])


def parse() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--wide", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--link-bound", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=Path("runs/grid_link.csv"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
