"""Run the cells of a grid that have no row yet, one after another.

    python scripts/study/run.py                                  # benchmarks/quality/: grid.yaml -> cells.csv
    python scripts/study/run.py --workers 2                      # two processes of one thread each
    python scripts/study/run.py --grid my.yaml --results my.csv

Stop it at any time, also with SIGKILL: only the cells in flight are lost, and the same command goes on. Several of
these commands may run side by side: a cell that one of them has begun is left to it. The grid is read again after every
cell, so that what is added to it meanwhile is run too.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from grid import CURVE_POINTS, Cell, Grid, load_grid
from results import CURVE, Results

from grass.training.data import DataConfig, load_data
from grass.training.loop import TrainConfig, Trainer
from grass.training.models import build_llama, llama_config
from grass.training.optimizers import build_optimizer

DIRECTORY = Path(__file__).parents[2] / "benchmarks" / "quality"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, default=DIRECTORY / "grid.yaml")
    parser.add_argument("--results", type=Path, default=DIRECTORY / "cells.csv")
    parser.add_argument("--locks", type=Path, default=Path("runs/study/locks"), help="where begun cells are marked")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="per process")
    args = parser.parse_args(argv)
    command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv), "--workers", "1"]
    others = [subprocess.Popen(command) for _ in range(args.workers - 1)]
    torch.set_num_threads(args.threads)
    results, unfinished = Results(args.results), False
    args.locks.mkdir(parents=True, exist_ok=True)
    while not unfinished:
        grid = load_grid(args.grid)
        with next_cell(grid, results, args.locks) as cell:
            if cell is None:
                break
            values = run_cell(cell, grid.data)
            if values is not None:
                results.append(cell, values)
                print(*cell.key, values[CURVE[-1]], flush=True)
            unfinished = values is None
    return max((process.wait() for process in others), default=int(unfinished))


def run_cell(cell: Cell, data_config: DataConfig) -> dict[str, Any] | None:
    """Train; the values of the cell's row, or ``None`` if a signal stopped it before the last step."""
    data = load_data(replace(data_config, seed=cell.seed))
    config = llama_config(cell.model, vocab_size=data.vocab_size, max_seq_len=data_config.seq_len)
    model = build_llama(config, seed=cell.seed)
    interval = cell.steps // CURVE_POINTS
    with tempfile.TemporaryDirectory() as out:
        train_config = TrainConfig(
            out=Path(out), steps=cell.steps, warmup=interval, autocast=True, eval_every=interval, log_every=interval
        )
        trainer = Trainer(model, build_optimizer(model, cell.optimizer), data, train_config)
        result = trainer.run()
        losses = pd.read_csv(Path(out) / "metrics.csv")["eval_loss"].dropna()
    if result.step < cell.steps:
        return None
    return {
        "tokens": cell.steps * trainer.tokens_per_step,
        "state_bytes": result.state_bytes.device,
        "host_bytes": result.state_bytes.host,
        "gradient_bytes": result.gradient_bytes,
        "commit": commit(),
        **{name: f"{loss:.4f}" for name, loss in zip(CURVE, losses, strict=True)},
    }


@contextmanager
def next_cell(grid: Grid, results: Results, locks: Path) -> Iterator[Cell | None]:
    """The first cell without a row that no other process runs; none will while this one does.

    A process that is killed gives its claim up.
    """
    for cell in grid.cells:
        name = hashlib.sha256(repr(cell.key).encode()).hexdigest()[:16]
        with (locks / name).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if cell.key not in results.done():
                yield cell
                return
    yield None


def commit() -> str:
    """The commit that runs, with a plus sign if tracked files differ from it."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty=+"]
    described = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
