"""Time training steps with the optimizer's state on the host: overlapped against the synchronous schedule.

    python scripts/bench/offload.py                       # a CPU as the device, some minutes, on an idle machine
    python scripts/bench/offload.py --hidden 64 --layers 1 --repeats 1   # seconds: checks that it runs

The device is the CPU itself, with one thread for the model, one for the host's update, and a link that sleeps until a
link of its rate would be done: so computing, copying and updating use resources of their own, as with a GPU.

``balanced`` rows: the sequence is as long, and the link as fast, that computing, the host's updates and the copies in
both directions take about equally long. ``synchronous`` copies all gradients down, then steps, then copies all values
up, before ``step`` returns, as ZeRO-Offload does. ``floor_ms`` is what clipping exactly allows: updates begin when
backward has ended, so only the forward, about a third of computing, can hide them.

``link-bound`` rows: AdamW's copies in both directions take 30 times as long as computing.

``fraction`` rows let the device step a share of the parameters. ``predicted_ms`` is the simulation of the same tasks
with the rates that were measured with fractions 0 and 1 only; ``tasks_ms`` is measured, from the first to the last
task of a step that waits for nothing else.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.machine.rates import RESOURCES, Machine
from grass.memory.llama import LlamaShape, llama_config
from grass.offload.fraction import GRID
from grass.offload.tasks import ParameterStep, Task, makespan, measured_seconds
from training.run.models import build_llama

FRACTIONS = (0.0, 1.0, 0.25, 0.5, 0.75)
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of a step, of which the balanced rows take the best."""
METHODS: dict[str, dict[str, float]] = {
    "AdamW": {},
    "Grass, r = q = 1/4": {"rank": 1 / 4, "explore": 1 / 4},
    "Grass, r = q = 1/8": {"rank": 1 / 8, "explore": 1 / 8},
    "Grass, r = 1/4, nothing explored": {"rank": 1 / 4, "explore": 0},
}
FRACTIONS_OF = "Grass, r = q = 1/4"
LINK_BOUND = 30
"""How many times as long as computing AdamW's copies take in the link-bound rows."""


class Racer:
    """A model and its optimizer."""

    def __init__(self, base: nn.Module, method: str, offload: grass.Offload | None, schedule: Any = None) -> None:
        self.model = copy.deepcopy(base)
        if METHODS[method]:
            grass.compact(self.model, **METHODS[method])
        params = self.model if METHODS[method] else self.model.parameters()
        self.optimizer = grass.GrassAdamW(params, lr=1e-3, update_interval=1_000_000_000, offload=offload)
        if schedule is not None:
            self.optimizer.offload.schedule = schedule
        self.seconds: list[float] = []
        self.tasks: list[float] = []

    def step(self, ids: Tensor) -> None:
        """One training step. The next call's forward waits for what this one leaves behind."""
        start = time.perf_counter()
        self.compute(ids)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)

    def compute(self, ids: Tensor) -> None:
        """Forward, backward, clipping."""
        self.model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def finish(self) -> None:
        """Wait for the host, and note how long the tasks of the last step took."""
        if self.optimizer.offload is None:
            return
        self.optimizer.offload.finish()
        self.tasks.append(measured_seconds(self.optimizer.offload.last_tasks))


def synchronous(units: Sequence[ParameterStep]) -> tuple[list[Task], list[Task]]:
    """A schedule in which no resource works while another does."""
    downs = [Task(f"{unit.name} gradient", "down", unit.bytes_down, (), unit.down) for unit in units]
    updates = [Task(f"{unit.name} update", "host", unit.elements, (downs[-1],), unit.update) for unit in units]
    ups = [Task(f"{unit.name} values", "up", unit.bytes_up, (updates[-1],), unit.up) for unit in units]
    return [*downs, *updates, *ups], ups


def computing(racer: Racer, ids: Tensor) -> float:
    """Seconds of forward, backward and clipping, without what waits for the host."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        racer.compute(ids)
        times.append(time.perf_counter() - start)
        racer.optimizer.zero_grad()
    return statistics.median(times[1:])


def updating(base: nn.Module, method: str, ids: Tensor) -> tuple[float, float]:
    """Seconds of the host's updates of one step, and the bytes that are copied in both directions."""
    racer = Racer(base, method, grass.Offload(), synchronous)
    busy, moved = [], 0.0
    for _ in range(5):
        racer.step(ids)
        racer.finish()
        tasks = racer.optimizer.offload.last_tasks
        busy.append(sum(t.end - t.start for t in tasks if t.resource == "host"))
        moved = sum(t.amount for t in tasks if t.resource in ("down", "up"))
    return statistics.median(busy[1:]), moved


def race(racers: dict[str, Racer], ids: Tensor, repeats: int) -> dict[str, float]:
    """Let everybody train in turn, several steps at a time so that steps overlap; median seconds of a step."""
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
    return {name: statistics.median(racer.seconds) for name, racer in racers.items()}


def balanced(base: nn.Module, method: str, tokens: Tensor, repeats: int) -> list[dict[str, object]]:
    """Computing, link and update take equally long."""
    update_s, moved = updating(base, method, tokens[:, : LENGTHS[0]])
    probe = Racer(base, method, None)
    times = {length: computing(probe, tokens[:, :length]) for length in LENGTHS if length <= tokens.shape[1]}
    length = min(times, key=lambda tried: abs(times[tried] - update_s))
    compute_s, rate = times[length], moved / update_s
    link = grass.Offload(_bytes_per_second=rate)
    racers = {
        "resident": Racer(base, method, None),
        "synchronous": Racer(base, method, grass.Offload(_bytes_per_second=rate, overlap=False), synchronous),
        "overlapped": Racer(base, method, link),
    }
    median = race(racers, tokens[:, :length], repeats)
    known = {"compute_ms": compute_s * 1e3, "update_ms": update_s * 1e3, "link_ms": moved / rate * 1e3}
    return [
        {
            "regime": "balanced",
            "contestant": f"{method}, {name}",
            "step_ms": seconds * 1e3,
            "times_synchronous": median["synchronous"] / seconds,
            "over_longest": seconds * 1e3 / max(known.values()),
            "floor_ms": 2 / 3 * known["compute_ms"] + max(known["update_ms"], known["link_ms"]),
            "seq_len": length,
            **known,
        }
        for name, seconds in median.items()
    ]


def link_bound(base: nn.Module, ids: Tensor, repeats: int) -> list[dict[str, object]]:
    """All methods over one slow link."""
    compute_s = computing(Racer(base, "AdamW", None), ids)
    rate = updating(base, "AdamW", ids)[1] / (LINK_BOUND * compute_s)
    racers = {name: Racer(base, name, grass.Offload(_bytes_per_second=rate)) for name in METHODS}
    median = race(racers, ids, repeats)
    return [
        {
            "regime": "link-bound",
            "contestant": name,
            "step_ms": seconds * 1e3,
            "times_adamw": median["AdamW"] / seconds,
            "seq_len": ids.shape[1],
            "compute_ms": compute_s * 1e3,
        }
        for name, seconds in median.items()
    ]


def fractions(base: nn.Module, ids: Tensor, repeats: int) -> list[dict[str, object]]:
    """Measured against simulated time of a step's tasks, by the share that the device steps."""
    update_s, moved = updating(base, FRACTIONS_OF, ids)
    rate = moved / 2 / update_s
    racers = {f: Racer(base, FRACTIONS_OF, grass.Offload(fraction=f, _bytes_per_second=rate)) for f in FRACTIONS}
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
    best = min(GRID, key=lambda f: makespan(plan(f), machine.seconds))
    return [
        {
            "regime": "fractions",
            "contestant": f"fraction {fraction:g}",
            "tasks_ms": statistics.median(racer.tasks) * 1e3,
            "predicted_ms": makespan(racer.optimizer.offload.plan(fraction), machine.seconds) * 1e3,
            "best_fraction": best,
            "seq_len": ids.shape[1],
        }
        for fraction, racer in racers.items()
    ]


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256, help="longest sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=Path("runs/offload.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = LlamaShape(args.hidden, 2 * args.hidden + args.hidden // 2, args.layers, args.hidden // 64)
    base = build_llama(llama_config(shape, vocab_size=256, max_seq_len=args.seq_len))
    tokens = torch.randint(256, (1, args.seq_len))
    short = tokens[:, : args.seq_len // 4]
    rows = [row for method in list(METHODS)[:2] for row in balanced(base, method, tokens, args.repeats)]
    rows += link_bound(base, short, args.repeats)
    rows += fractions(base, short, args.repeats)
    result = pd.DataFrame(rows)
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, hidden=args.hidden, layers=args.layers)


if __name__ == "__main__":
    main()
