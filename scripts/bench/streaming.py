"""Time training steps of a model whose units visit the device, over a link that sleeps, against the resident model.

    python scripts/bench/streaming.py                       # a CPU as the device, half an hour, on an idle machine
    python scripts/bench/streaming.py --hidden 64 --layers 4 --seq-len 16 --repeats 1   # seconds: checks that it runs

The device is the CPU itself, with one thread for the model and one for the host's update. Converted layers have r = q =
n/8. Every contestant clips and recomputes each unit's forward in backward, the resident ones too. Freed memory is kept
for the next unit, as a GPU's allocator keeps it. ``of_resident`` is the median over rounds of the resident model's
seconds by the contestant's in the same round.

The rows of a regime have one link. Its rate is such that the uncached loads of a step take so many times as long as
the resident model's whole step: ``fast`` 0.4, ``level`` 0.5, ``between`` 0.8, ``slow`` 3 times. At 0.5 a unit is copied
as fast as it computes in forward, which has half of the loads and a quarter of the computing. ``of_link`` is the share
of the step in which the link copies up.

``predicted_ms`` is what the planner's tasks take with rates that were measured on the resident model and on the link's
own rate.
"""

from __future__ import annotations

import copy
import ctypes
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
from grass.machine.rates import Machine, host_rate
from grass.memory import Architecture, Setting
from grass.memory.llama import LlamaShape, llama_config
from grass.memory.methods import METHODS
from grass.memory.streaming import step_seconds, visiting
from training.run.models import build_llama, enable_checkpointing

RANK = 1 / 8
REGIMES = {"fast": 0.4, "level": 0.5, "between": 0.8, "slow": 3.0}
"""Seconds of the link for the loads of a step, over those of the resident model's step."""
STEPS = 3
"""Steps of a contestant before the next one's turn."""


class Racer:
    """A model, resident or streamed, and its optimizer."""

    def __init__(self, base: nn.Module, method: str, rate: float | None, *, batches: int = 0, **stream: object) -> None:
        self.model, self.stream, self.batches = copy.deepcopy(base), None, batches
        if method == "Grass":
            grass.compact(self.model, rank=RANK)
        params = self.model if method == "Grass" else self.model.parameters()
        self.optimizer = grass.GrassAdamW(params, lr=1e-3, offload="cpu")
        if rate is None:
            enable_checkpointing(self.model)
        else:
            self.stream = grass.stream(
                self.model, device="cpu", offload=grass.Offload(_bytes_per_second=rate), **stream
            )
        self.seconds: list[float] = []
        self.copied = 0

    def loss(self, ids: Tensor) -> Tensor:
        """The share of one micro-batch in the loss of a step."""
        return self.model(input_ids=ids, labels=ids).loss / max(1, self.batches)

    def step(self, ids: Tensor) -> None:
        """One training step. The next one's forward waits for the host."""
        start, before = time.perf_counter(), self.stream.counts.bytes if self.stream else 0
        if self.batches:  # so many micro-batches through one unit before the next
            self.stream.step(ids.tensor_split(self.batches, 1), self.loss)
        else:
            self.loss(ids).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.copied = self.stream.counts.bytes - before if self.stream else 0


def race(racers: dict[str, Racer], ids: Tensor, repeats: int) -> pd.DataFrame:
    """Let everybody train in turn, several steps at a time so that steps overlap; a round's median seconds of a step.

    Returns:
        A row for each round, a column for each contestant.
    """
    rounds = []
    for number in range(repeats + 1):
        for racer in racers.values():
            racer.step(ids)  # whose forward waits for nothing
            racer.seconds.clear()
            for _ in range(STEPS if number else 1):
                racer.step(ids)
            racer.optimizer.offload.finish()
        rounds.append({name: statistics.median(racer.seconds) for name, racer in racers.items()})
    return pd.DataFrame(rounds[1:])  # the first one warms up


def keep_freed_memory() -> None:
    """Let the C library keep what is freed: fresh pages from the system would count as time of streaming."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        library.mallopt(mmap_threshold, 1 << 30)
        library.mallopt(trim_threshold, 1 << 30)


def regime(name: str, base: nn.Module, config: object, ids: Tensor, repeats: int) -> list[dict[str, object]]:
    """One table: the resident model, and streamed ones over one link."""
    model = Architecture.from_config(config)
    common = {"dtype": torch.float32, "seq_len": ids.shape[1], "offload": True, "stream": True, "chunk_tokens": 0}
    plain = Setting(rank=RANK, **common)
    units = {method: visiting(METHODS[method](model, plain), model, plain) for method in ("AdamW", "Grass")}
    resident = race({"resident": Racer(base, "Grass", None)}, ids, 1)["resident"].item()
    rate = units["Grass"].bytes_up / (REGIMES[name] * resident)
    half = units["Grass"].nbytes * (units["Grass"].number // 2)
    racers = {
        "Grass, resident": Racer(base, "Grass", None),
        "Grass, streamed": Racer(base, "Grass", rate),
        "Grass, streamed, by stream.step": Racer(base, "Grass", rate, batches=1),
        "Grass, streamed, inputs on the host": Racer(base, "Grass", rate, offload_activations=True),
        "Grass, streamed, half of the units cached": Racer(base, "Grass", rate, cache=half),
        "AdamW, streamed": Racer(base, "AdamW", rate),
    }
    settings = {"Grass, streamed": plain, "AdamW, streamed": plain}
    settings["Grass, streamed, half of the units cached"] = Setting(rank=RANK, cache=half, **common)
    rounds = race(racers, ids, repeats)
    median, ratio = rounds.median(), rounds.rdiv(rounds["Grass, resident"], axis=0).median()
    inside, head = model.layers * (model.layer_matrix + model.vectors), 6 * ids.numel() * model.head
    flops = (6 + 2 * 2 * RANK) * ids.numel() * inside + head
    machine = Machine(host_rate(), rate, rate, float("inf"), "", flops / median["Grass, resident"])
    rows = []
    for contestant, seconds in median.items():
        method = contestant.split(",")[0]
        held = METHODS[method](model, plain)
        planned = settings.get(contestant)
        rows.append(
            {
                "regime": name,
                "contestant": contestant,
                "step_ms": seconds * 1e3,
                "of_resident": ratio[contestant],
                "link_ms": racers[contestant].copied / rate * 1e3,
                "of_link": racers[contestant].copied / rate / seconds,
                "predicted_ms": step_seconds(method, held, model, planned, machine) * 1e3 if planned else None,
                "units_on_device": visiting(held, model, planned or plain).on_device,
                "units": model.layers,
                "seq_len": ids.shape[1],
            }
        )
    return rows


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=Path("runs/streaming.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    shape = LlamaShape(args.hidden, 2 * args.hidden + args.hidden // 2, args.layers, args.hidden // 64)
    config = llama_config(shape, vocab_size=256, max_seq_len=args.seq_len)
    base = build_llama(config)
    ids = torch.randint(256, (1, args.seq_len))
    rows = [row for name in REGIMES for row in regime(name, base, config, ids, args.repeats)]
    result = pd.DataFrame(rows)
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv, hidden=args.hidden)


if __name__ == "__main__":
    main()
