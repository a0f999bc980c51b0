"""Run the cells of a grid that have no row yet, in one process or several.

    python scripts/study/run.py                                  # benchmarks/quality/: grid.yaml -> cells.csv
    python scripts/study/run.py --workers 2                      # two cells at a time, of one thread each
    python scripts/study/run.py --grid my.yaml --results my.csv
    python scripts/study/run.py --study law widest               # those alone
    python scripts/study/run.py --grid benchmarks/gpu/grid.yaml --device cuda --workers 15   # on one GPU

Stop it at any time, also with SIGKILL: the same command goes on, pretraining from the last evaluation of the cells in
flight. Whenever a process is free it reads the grid again: what was added meanwhile is run too, and brackets go on.
Several commands may share ``--results`` and ``--out``. ``--out`` has what cells print, and their checkpoints until
they end.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from base import BASE, ensure_base
from grid import Cell, Grid, load_grid
from pretraining import pretrain
from results import CURVE, Results

sys.path.append(str(Path(__file__).parents[1]))
from provenance import commit

from grass.command_line import ArgumentParser
from grass.sweep.lock import Lock
from grass.sweep.worker import die_with_parent

DIRECTORY = Path(__file__).parents[2] / "benchmarks" / "quality"

PAUSE = 0.5
"""Seconds until a process looks again for a cell, while others train all that are left."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What every process is told.

    Attributes:
        grid: the file.
        results: the file of rows.
        names: of the grid's studies; ``None``: all.
        out: the folder of locks, logs and checkpoints.
        base: directory of the model to finetune.
        device: where pretraining runs.
        threads: of a process.
    """

    grid: Path
    results: Path
    names: Sequence[str] | None
    out: Path
    base: Path
    device: str = "cpu"
    threads: int = 1

    def path(self, cell: Cell, kind: str = "") -> Path:
        """A file of a cell, by its ending; without one the folder of its checkpoints."""
        digest = hashlib.sha256(repr(cell.key).encode()).hexdigest()[:12]
        return self.out / f"{cell.model}-{cell.steps}-{cell.seed}-{cell.optimizer.name}-{digest}{kind}"

    def left(self) -> list[Cell]:
        """The cells without a row that have not failed."""
        cells = cells_without_row(self.grid, self.results, self.names)
        return [cell for cell in cells if not self.path(cell, ".error").exists()]


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--grid", type=Path, default=DIRECTORY / "grid.yaml")
    parser.add_argument("--results", type=Path, help="default: cells.csv beside the grid")
    parser.add_argument("--study", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/study/cells"), help="logs and checkpoints of the cells")
    parser.add_argument("--base", type=Path, default=BASE, help="model to finetune, made if it is not there")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="per process")
    parser.add_argument("--device", default="cpu", help="where pretraining runs, of all processes")
    args = parser.parse_args(argv)
    study = Study(
        grid=args.grid,
        results=args.results or args.grid.with_name("cells.csv"),
        names=args.study,
        out=args.out,
        base=args.base,
        device=args.device,
        threads=args.threads,
    )
    try:
        study.out.mkdir(parents=True, exist_ok=True)
        for told in study.out.glob("*.error"):  # try again
            told.unlink(missing_ok=True)
        count = min(args.workers, len(study.left()))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    codes = run_processes(study, count)
    for told in sorted(study.out.glob("*.error")):
        print(told.read_text(), file=sys.stderr)
    return int(any(codes))


def run_processes(study: Study, count: int) -> list[int | None]:
    """Let processes train what is left; how each ended. Ctrl-C reaches all, and is waited for."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(study,)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        try:
            process.join()
        except KeyboardInterrupt:
            process.join()
    return [process.exitcode for process in processes]


def work(study: Study) -> None:
    """Train cells, one after the other, until all have a row or have failed.

    Raises:
        SystemExit: a cell has failed here, or a signal stopped one.
    """
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(study.threads)
    failed = False
    while cells := study.left():
        taken = ((cell, lock) for cell in cells if (lock := Lock.take(study.path(cell, ".lock"))) is not None)
        cell, lock = next(taken, (None, None))
        if cell is None or lock is None:
            time.sleep(PAUSE)
            continue
        if cell in study.left():  # else another process had ended it before the lock was taken
            failed = not train(cell, study) or failed
        lock.release()
    sys.exit(int(failed))


def train(cell: Cell, study: Study) -> bool:
    """Train one cell and append its row; ``False`` if an error, which a file tells, ended it.

    Raises:
        SystemExit: a signal stopped it before the last step. It has no row then.
    """
    name = ", ".join(cell.key)
    try:
        with _printing_to(study.path(cell, ".log")):
            loaded = load_grid(study.grid, Results(study.results).losses())
            values = run_cell(cell, loaded, study.base, study.path(cell), study.device)
    except Exception as error:
        study.path(cell, ".error").write_text(f"{name}: {type(error).__name__}: {error}")
        return False
    if values is None:
        raise SystemExit(os.EX_TEMPFAIL)
    Results(study.results).append(cell, values)
    print(f"{values[CURVE[-1]]}  {name}", flush=True)
    return True


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Send what Python prints to a file, also the traceback of an error."""
    with path.open("a") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise


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
