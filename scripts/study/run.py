"""Run the cells of a grid that have no row yet, by ``grass.sweep``: each is a trial in a process of its own.

    python scripts/study/run.py                                  # benchmarks/quality/: grid.yaml -> cells.csv
    python scripts/study/run.py --workers 2                      # two cells at a time, of one thread each
    python scripts/study/run.py --grid my.yaml --results my.csv
    python scripts/study/run.py --study law widest               # those alone
    python scripts/study/run.py --grid benchmarks/gpu/grid.yaml --device cuda --workers 8    # on one GPU

Stop it at any time, also with SIGKILL: the same command goes on, pretraining from the last evaluation of the cells in
flight. When all cells have ended the grid is read again: what was added to it meanwhile is run too, and brackets go on.
``--out`` has what cells print, and their checkpoints until they end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from base import BASE, ensure_base
from grid import CURVE_POINTS, Cell, Grid, load_grid
from pretraining import pretrain
from results import CURVE, KEY, Results

sys.path.append(str(Path(__file__).parents[1]))
from provenance import commit

import grass.sweep
from grass.command_line import ArgumentParser

DIRECTORY = Path(__file__).parents[2] / "benchmarks" / "quality"


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--grid", type=Path, default=DIRECTORY / "grid.yaml")
    parser.add_argument("--results", type=Path, help="default: cells.csv beside the grid")
    parser.add_argument("--study", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/study/sweep"), help="journals and logs of the cells")
    parser.add_argument("--base", type=Path, default=BASE, help="model to finetune, made if it is not there")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="per process")
    parser.add_argument("--device", default="cpu", help="where pretraining runs, of all processes")
    args = parser.parse_args(argv)
    results = args.results or args.grid.with_name("cells.csv")
    options = {"base": str(args.base), "threads": args.threads, "on": args.device}
    trial = partial(train, grid=str(args.grid), results=str(results), **options)
    devices, failed = [f"cpu:{i}" for i in range(args.workers)], list[dict[str, Any]]()
    try:
        while not failed and (cells := cells_without_row(args.grid, results, args.study)):
            keys = [dict(zip(KEY, cell.key, strict=True)) for cell in cells]
            table = grass.sweep.run(
                trial, keys, out=args.out, steps=CURVE_POINTS, devices=devices, seconds=in_order, retry=True
            )
            done = Results(results).losses()
            failed = [row for row in table if tuple(row[name] for name in KEY) not in done]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for row in failed:
        why = row["message"] or f"{args.out} says that it has ended, so it has lost its row: remove {args.out}"
        print(*(row[name] for name in KEY), why, sep=", ", file=sys.stderr)
    return int(bool(failed))


def cells_without_row(grid: Path, results: Path, studies: Sequence[str] | None = None) -> list[Cell]:
    """The cells that are to be run, of all studies or some, in the order of their importance.

    Raises:
        ValueError: there is no study of a name.
    """
    losses = Results(results).losses()
    loaded = load_grid(grid, losses)
    if unknown := sorted(set(studies or ()) - set(loaded.names)):
        raise ValueError(f"Unknown study {unknown[0]!r}; available: {', '.join(loaded.names)}")
    if studies is not None:
        loaded = replace(loaded, studies=tuple(map(loaded.study, studies)))
    return [cell for cell in loaded.cells if cell.key not in losses]


def in_order(**key: str) -> float:
    """The time of every cell, as if all were alike: so they start in the order of the grid."""
    return 1.0


def train(
    *, folder: Path, device: str, grid: str, results: str, base: str, threads: int, on: str = "cpu", **key: str
) -> Iterator[tuple[int, float]]:
    """One cell as a trial of a sweep: append its row to the results, and yield its losses.

    A process that is told to end before the last step ends without a row.
    """
    torch.set_num_threads(threads)
    loaded = load_grid(Path(grid), Results(Path(results)).losses())
    cell = next(cell for cell in loaded.cells if cell.key == tuple(key[name] for name in KEY))
    values = run_cell(cell, loaded, Path(base), folder, on)
    if values is None:
        raise SystemExit(os.EX_TEMPFAIL)
    Results(Path(results)).append(cell, values)
    yield from enumerate((float(values[name]) for name in CURVE), 1)


def run_cell(cell: Cell, grid: Grid, base: Path, folder: Path, device: str = "cpu") -> dict[str, Any] | None:
    """Train; the values of the cell's row, or ``None`` if a signal stopped it before the last step.

    Pretraining keeps its checkpoints in ``folder``. Finetuning starts from the model in the directory ``base``, which
    is made if it is not there, on the CPU.
    """
    if cell.task == "pretrain":
        values = pretrain(cell, grid.data, folder, device)
    else:
        from finetuning import finetune  # needs datasets, which pretraining does not

        values = finetune(cell, grid.finetuning[cell.task], ensure_base(base))
    return None if values is None else {**values, "commit": commit()}


if __name__ == "__main__":
    sys.exit(main())
