"""Measure the peak memory of training with every method, a process each: `peak_memory.csv` beside the cells.

    python scripts/study/peak_memory.py                                   # five minutes, also beside other work
    python scripts/study/peak_memory.py --model 1m --methods adamw muon   # a minute

``peak_mb`` is the most that was resident in a process, less what was before the model was made: weights, gradients,
optimizer state, activations, the text and what the allocator keeps, in megabytes. Before, a small model trained with
the same method, so that imports do not count. A refresh is within the steps.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path

import pandas as pd
import psutil
import torch
from speed import UNTIMED, contestants_parser, trainer

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

from training.run.throughput import peak_memory

COMPACT_RANKS = [0.25, 0.125, 0.0625, 0.03125, 0.015625]
"""Compact mode is measured with each; the others with the first, of which the losses are."""
SMALL = "1m"
STEPS = 2
"""After the untimed ones; also the interval."""


def main() -> None:
    args = contestants_parser(__doc__, out="peak_memory.csv", model="28m-wide").parse_args()
    ranks = [(name, rank) for name in args.methods for rank in COMPACT_RANKS if rank == 0.25 or "compact" in name]
    # spawned, so that none inherits what another one's imports or tensors left behind
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.starmap(measure, [(name, rank, args.model) for name, rank in ranks], chunksize=1)
    table = pd.DataFrame(rows)
    write(table, args.out, steps=UNTIMED + STEPS)
    print(table.to_string())


def measure(name: str, rank: float, model: str) -> dict[str, str | float]:
    """A row of the table, in a process that has trained nothing before."""
    torch.set_num_threads(1)
    train(name, rank, SMALL)
    before = psutil.Process().memory_info().rss
    train(name, rank, model)
    peak = peak_memory(torch.device("cpu")) - before
    return {"method": name, "model": model, "rank": rank, "peak_mb": round(peak / 1e6)}


def train(name: str, rank: float, model: str) -> None:
    with tempfile.TemporaryDirectory() as out:
        contestant = trainer(name, model, rank, STEPS, Path(out))
        for _ in range(STEPS):
            contestant.train_step()


if __name__ == "__main__":
    main()
