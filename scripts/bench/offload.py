"""Time training steps with the optimizer's state on the host: overlapped against one after the other.

    python scripts/bench/offload.py                       # a CPU as the device, some minutes
    python scripts/bench/offload.py --hidden 64 --layers 1 --repeats 1   # seconds: checks that it runs

The device is the CPU itself, with one thread for the model, one for the host's update, and a link that sleeps until a
link of its rate would be done: so computing, copying and updating use resources of their own, as with a GPU. ``--rate``
sets the link so that the copies of a step take as long as the host's update. Contestants take turns.

``fraction`` rows let the device step a share of the parameters. ``predicted_ms`` is the simulation of the same tasks
with the rates that were measured with fractions 0 and 1 only; ``tasks_ms`` is measured, from the first to the last
task of a step that waits for nothing else.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.memory.llama import LlamaShape, llama_config
from grass.offload.machine import Machine
from grass.offload.placement import GRID
from grass.offload.tasks import RESOURCES, measured_seconds, simulate
from grass.training.run.models import build_llama

FRACTIONS = (0.0, 1.0, 0.25, 0.5, 0.75)
RANK = 1 / 8


class Racer:
    """A model and its optimizer."""

    def __init__(self, base: nn.Module, rank: float | None, offload: grass.Offload | None) -> None:
        self.model = copy.deepcopy(base)
        if rank is not None:
            grass.compact(self.model, rank=rank)
        params = self.model if rank is not None else self.model.parameters()
        self.optimizer = grass.GrassAdamW(params, lr=1e-3, update_interval=1_000_000_000, offload=offload)
        self.seconds: list[float] = []
        self.tasks: list[float] = []

    def step(self, ids: Tensor) -> None:
        """Forward, backward, clipping, step. The next call's forward waits for what this one leaves behind."""
        start = time.perf_counter()
        self.model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)

    def finish(self) -> None:
        """Wait for the host, and note how long the tasks of the last step took."""
        if self.optimizer.offload is None:
            return
        self.optimizer.offload.finish()
        self.tasks.append(measured_seconds(self.optimizer.offload.last_tasks))


def computing(base: nn.Module, ids: Tensor) -> float:
    """Seconds of forward and backward of the converted model."""
    racer = Racer(base, RANK, None)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        racer.model(input_ids=ids, labels=ids).loss.backward()
        times.append(time.perf_counter() - start)
        racer.optimizer.zero_grad()
    return statistics.median(times)


def update(base: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Seconds of the host's updates of one step, and the bytes that it copies down."""
    racer = Racer(base, RANK, grass.Offload(overlap=False))
    for _ in range(4):
        racer.step(ids)
        racer.finish()
    tasks = racer.optimizer.offload.last_tasks
    busy = sum(t.end - t.start for t in tasks if t.resource == "host")
    return busy, sum(t.amount for t in tasks if t.resource == "down")


def race(racers: dict[str, Racer], ids: Tensor, repeats: int) -> None:
    """Let everybody train in turn, several steps at a time so that steps overlap."""
    for racer in racers.values():
        for _ in range(2):
            racer.step(ids)
        racer.finish()
        racer.seconds.clear()
        racer.tasks.clear()
    for _ in range(repeats):
        for racer in racers.values():
            racer.step(ids)  # whose forward waits for nothing
            racer.seconds.pop()
            for _ in range(3):
                racer.step(ids)
            racer.finish()


def fractions(base: nn.Module, ids: Tensor, rate: float, repeats: int) -> list[dict[str, object]]:
    """Measured against simulated time of a step's tasks, by the share that the device steps."""
    racers = {f: Racer(base, RANK, grass.Offload(fraction=f, bytes_per_second=rate)) for f in FRACTIONS}
    amounts, seconds = dict.fromkeys(RESOURCES, 0.0), dict.fromkeys(RESOURCES, 0.0)
    for racer in racers.values():
        racer.step(ids)
        racer.finish()
        racer.tasks.clear()
    for _ in range(repeats):
        for fraction, racer in racers.items():
            racer.step(ids)
            racer.finish()
            if fraction in (0.0, 1.0):
                for task in racer.optimizer.offload.last_tasks:
                    amounts[task.resource] += task.amount
                    seconds[task.resource] += task.end - task.start
    machine = Machine(*(amounts[name] / seconds[name] for name in ("host", "down", "up", "device")))
    plan = racers[0.0].optimizer.offload.plan
    best = min(GRID, key=lambda f: simulate(plan(f), machine.seconds).makespan)
    return [
        {
            "contestant": f"fraction {fraction:g}",
            "tasks_ms": statistics.median(racer.tasks) * 1e3,
            "predicted_ms": simulate(racer.optimizer.offload.plan(fraction), machine.seconds).makespan * 1e3,
            "best_fraction": best,
        }
        for fraction, racer in racers.items()
    ]


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=Path("runs/offload.csv"))
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = LlamaShape(args.hidden, 2 * args.hidden + args.hidden // 2, args.layers, args.hidden // 64)
    base = build_llama(llama_config(shape, vocab_size=256, max_seq_len=args.seq_len))
    ids = torch.randint(256, (1, args.seq_len))
    compute_s, (update_s, sent) = computing(base, ids), update(base, ids)
    rate = sent / update_s
    racers = {
        "resident": Racer(base, RANK, None),
        "one after the other": Racer(base, RANK, grass.Offload(overlap=False, bytes_per_second=rate)),
        "overlapped": Racer(base, RANK, grass.Offload(bytes_per_second=rate)),
        "AdamW, overlapped": Racer(base, None, grass.Offload(bytes_per_second=rate)),
    }
    race(racers, ids, args.repeats)
    median = {name: statistics.median(racer.seconds) for name, racer in racers.items()}
    rows: list[dict[str, object]] = [
        {
            "contestant": name,
            "step_ms": seconds * 1e3,
            "times_synchronous": median["one after the other"] / seconds,
            "over_longest": seconds / max(compute_s, update_s),
        }
        for name, seconds in median.items()
    ]
    rows += fractions(base, ids, rate, args.repeats)
    result = pd.DataFrame(rows)
    print(result.to_string(index=False, float_format="%.3f"))
    run = {"hidden": args.hidden, "layers": args.layers, "seq_len": args.seq_len, "rank": RANK}
    times = {"compute_ms": compute_s * 1e3, "update_ms": update_s * 1e3, "link_mb_s": rate / 1e6}
    write(result, args.csv, **run, **times)


if __name__ == "__main__":
    main()
