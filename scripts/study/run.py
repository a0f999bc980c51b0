"""Run the cells of a grid that have no row yet, one after another.

    python scripts/study/run.py                                  # benchmarks/quality/: grid.yaml -> cells.csv
    python scripts/study/run.py --workers 2                      # two processes of one thread each
    python scripts/study/run.py --grid my.yaml --results my.csv

Stop it at any time, also with SIGKILL: only the cells in flight are lost, and the same command goes on. Several of
these commands may run side by side: a cell that one of them has begun is left to it. The grid is read again after every
cell, so that what is added to it meanwhile is run too.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from base import BASE, ensure_base
from finetuning import finetune
from grid import Cell, Grid, load_grid
from pretraining import pretrain
from results import CURVE, Results

sys.path.append(str(Path(__file__).parents[1]))
from provenance import commit

from grass.command_line import ArgumentParser

DIRECTORY = Path(__file__).parents[2] / "benchmarks" / "quality"


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--grid", type=Path, default=DIRECTORY / "grid.yaml")
    parser.add_argument("--results", type=Path, help="default: cells.csv beside the grid")
    parser.add_argument("--locks", type=Path, default=Path("runs/study/locks"), help="where begun cells are marked")
    parser.add_argument("--base", type=Path, default=BASE, help="model to finetune, made if it is not there")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="per process")
    args = parser.parse_args(argv)
    try:
        load_grid(args.grid)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv), "--workers", "1"]
    others = [subprocess.Popen(command) for _ in range(args.workers - 1)]
    torch.set_num_threads(args.threads)
    results, unfinished = Results(args.results or args.grid.with_name("cells.csv")), False
    args.locks.mkdir(parents=True, exist_ok=True)
    while not unfinished:
        grid = load_grid(args.grid)
        with next_cell(grid, results, args.locks) as cell:
            if cell is None:
                break
            values = run_cell(cell, grid, args.base)
            if values is not None:
                results.append(cell, values)
                print(*cell.key, values[CURVE[-1]], flush=True)
            unfinished = values is None
    return max((process.wait() for process in others), default=int(unfinished))


def run_cell(cell: Cell, grid: Grid, base: Path) -> dict[str, Any] | None:
    """Train; the values of the cell's row, or ``None`` if a signal stopped it before the last step.

    Finetuning starts from the model in the directory ``base``, which is made if it is not there.
    """
    if cell.task == "pretrain":
        values = pretrain(cell, grid.data)
    else:
        values = finetune(cell, grid.finetuning[cell.task], ensure_base(base))
    return None if values is None else {**values, "commit": commit()}


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


if __name__ == "__main__":
    sys.exit(main())
