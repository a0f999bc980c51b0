r"""Time the training step of every method, one after another in one run: `speed.csv` beside the cells.

    python scripts/study/speed.py                       # on an otherwise idle machine, about 2 minutes
    python scripts/study/speed.py --rounds 1 --block 2  # seconds: checks that it runs
    python scripts/study/speed.py --model 28m-wide --rank 0.25 0.125 0.0625 0.03125 0.015625 --rounds 5 --block 6 \
        --out benchmarks/quality/speed_wide.csv         # 17 minutes: the widest model

Of several ranks the first has all contestants, the others AdamW and compact modes. Every method trains its own copy of
the model. A round is a block of steps of each; ``step_ms`` is the median over all steps. Blocks are as long as the
interval, so that each holds one refresh, and ``refresh_ms`` is what that adds: the block less as many median steps,
median over rounds. A step with refreshes every ``K`` is ``step_ms + refresh_ms / K``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from run import DIRECTORY
from tqdm import trange

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

from grass.command_line import ArgumentParser
from grass.memory.llama import LLAMA_SHAPES, llama_config
from training.data.blocks import DataConfig
from training.data.loading import load_data
from training.run.config import TrainConfig
from training.run.loop import Trainer
from training.run.models import build_llama
from training.run.optimizers import OptimizerConfig, build_optimizer

CONTESTANTS = {
    "adamw": OptimizerConfig(name="adamw"),
    "grass": OptimizerConfig(name="grass"),
    "grass rows": OptimizerConfig(name="grass", explore=0),
    "grass compact": OptimizerConfig(name="grass", compact=True),
    "galore": OptimizerConfig(name="galore"),
    "apollo": OptimizerConfig(name="apollo"),
    "fira": OptimizerConfig(name="fira"),
    "adafactor": OptimizerConfig(name="adafactor"),
    "adamw8bit": OptimizerConfig(name="adamw8bit"),
    "muon": OptimizerConfig(name="muon"),
    "muon compact": OptimizerConfig(name="muon", compact=True),
}
BY_RANK = ("adamw", "grass compact", "muon compact")
"""Contestants that are timed at every rank: losses of the others are of one."""
UNTIMED = 2
"""Steps before the first round: compilation, state, memory."""


def main() -> None:
    parser = contestants_parser(__doc__, out="speed.csv", model="1m")
    parser.add_argument("--rank", type=float, nargs="+", default=[0.25])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block", type=int, default=10, help="steps per method and round")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    first, *others = args.rank
    compared = [name for name in args.methods if name in BY_RANK]
    ranks = [(first, args.methods), *((rank, compared) for rank in others)]
    table = pd.concat([timed(rank, methods, args) for rank, methods in ranks], ignore_index=True)
    write(table, args.out, rounds=args.rounds, block=args.block)
    print(table.to_string())


def timed(rank: float, methods: list[str], args: argparse.Namespace) -> pd.DataFrame:
    """A row of each method, whose blocks of steps alternate."""
    with tempfile.TemporaryDirectory() as out:
        trainers = {name: trainer(name, args.model, rank, args.block, Path(out)) for name in methods}
        seconds: dict[str, list[list[float]]] = {name: [] for name in trainers}
        for _ in trange(args.rounds):
            for name, contestant in trainers.items():
                seconds[name].append([timed_step(contestant) for _ in range(args.block)])
    rows = [{"method": name, "model": args.model, **summary(blocks), "rank": rank} for name, blocks in seconds.items()]
    return pd.DataFrame(rows)


def contestants_parser(doc: str | None, *, out: str, model: str) -> ArgumentParser:
    """Flags of a measurement of contestants; ``out`` is the CSV beside the cells and ``model`` the default one."""
    parser = ArgumentParser(doc)
    parser.add_argument("--out", type=Path, default=DIRECTORY / out)
    parser.add_argument("--model", choices=LLAMA_SHAPES, default=model)
    parser.add_argument("--methods", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="contestants")
    return parser


def trainer(name: str, model_name: str, rank: float, interval: int, out: Path) -> Trainer:
    """A contestant, past its first steps."""
    data = load_data(DataConfig(eval_blocks=1))
    model = build_llama(llama_config(model_name, vocab_size=data.vocab_size, max_seq_len=data.train.seq_len))
    config = replace(CONTESTANTS[name], rank=rank, update_interval=interval)
    train_config = TrainConfig(out=out, steps=1_000_000, autocast=True)
    contestant = Trainer(model, build_optimizer(model, config), data, train_config)
    for _ in range(UNTIMED):
        contestant.train_step()
    return contestant


def timed_step(contestant: Trainer) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    contestant.train_step()
    return time.perf_counter() - start


def summary(blocks: list[list[float]]) -> dict[str, float]:
    """Milliseconds of a step and of what a refresh adds."""
    step = statistics.median(seconds for block in blocks for seconds in block)
    refresh = statistics.median(sum(block) - len(block) * step for block in blocks)
    return {"step_ms": round(1e3 * step, 2), "refresh_ms": round(1e3 * max(refresh, 0.0), 2)}


if __name__ == "__main__":
    main()
