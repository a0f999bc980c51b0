"""Track the peak memory of a step of each method that finetunes or is on the frontier: `tracked_memory.csv`.

    python scripts/study/tracked_memory.py      # a minute or two, with the base model of base.py

``peak_mb`` is what torch's memory tracker counts at the largest moment of a step that is no refresh: weights,
gradients, optimizer state and activations of a full batch, in megabytes. Finetuning is the study of adapters, in
float32. The frontier's are the runs of the widest model, under bf16 autocast, on tensors without contents where the
method can step on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import torch
from base import BASE, ensure_base
from finetuning import finetune_task, trained_model
from grid import FINETUNING, Cell, Grid, load_grid
from plot import FRONTIER, ITS_STEPS, LONG_STEPS, WIDEST
from results import Results
from run import DIRECTORY
from torch.compiler import set_stance

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "bench"))
from memory_tracking import fake_tensors, make_state, tracked_step
from page_tables.finetuning import STUDY, method
from page_tables.methods import computes_in_bf16, method_of_the_widest
from page_tables.study import method_name
from provenance import write
from tracked_methods import prepare

from grass.command_line import ArgumentParser
from grass.memory.llama import llama_config
from training.data.blocks import DataConfig
from training.data.loading import load_data
from training.run.models import build_llama
from training.run.optimizers import build_optimizer

COMPILED = "adamw8bit"
"""An optimizer whose step has temporaries only where it is not compiled: it is not tracked."""

READS_CONTENTS = frozenset({"APOLLO", "Fira", "Grass dense", "Muon compact"})
"""Methods that cannot step on tensors without contents: they compute."""


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="of grid.yaml and cells.csv")
    parser.add_argument("--gpu", type=Path, default=DIRECTORY.parent / "gpu", help="likewise, of the long runs")
    parser.add_argument("--base", type=Path, default=BASE, help="model to finetune, made if it is not there")
    parser.add_argument("--out", type=Path, default=DIRECTORY / "tracked_memory.csv")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    ensure_base(args.base, autocast=False)
    here, gpu = (_grid(directory) for directory in (args.directory, args.gpu))
    rows = [*_finetuning_rows(here, args.base), *_frontier_rows(here, gpu)]
    write(pd.DataFrame(rows), args.out)


def _grid(directory: Path) -> Grid:
    return load_grid(directory / "grid.yaml", Results(directory / "cells.csv").losses())


def _finetuning_rows(grid: Grid, base: Path) -> Iterator[dict[str, str]]:
    cells = {(cell.task, method(cell.optimizer.name, cell.settings)): cell for cell in grid.study(STUDY).cells}
    for (task, name), cell in cells.items():
        yield {"task": task, "method": name, "peak_mb": f"{peak_of_finetuning(cell, base) / 1e6:.1f}"}


def _frontier_rows(here: Grid, gpu: Grid) -> Iterator[dict[str, str]]:
    cells = {**_of_the_widest(here, ITS_STEPS), **_of_the_widest(gpu, LONG_STEPS)}
    for name in FRONTIER:
        yield {"task": "pretrain", "method": name, "peak_mb": f"{peak_of_pretraining(cells[name], here) / 1e6:.1f}"}


def _of_the_widest(grid: Grid, steps: str) -> dict[str, Cell]:
    """A cell of each method that trained the widest model for so long, with matrix products in bfloat16."""
    found = [cell for cell in grid.cells if (cell.model, str(cell.steps)) == (WIDEST, steps)]
    rows = ((cell, {"optimizer": cell.optimizer.name, "settings": cell.settings}) for cell in found)
    return {method_of_the_widest(row): cell for cell, row in rows if computes_in_bf16(row)}


def peak_of_finetuning(cell: Cell, base: Path) -> int:
    """Bytes at the largest moment of a step of a cell's method, after one that made its state."""
    config = FINETUNING[cell.task]
    task = finetune_task(cell, replace(config, examples=2), base)
    model = trained_model(task, cell)
    model.train()
    optimizer = build_optimizer(model, cell.optimizer)
    ids = torch.full((config.batch_size, config.max_length), 5)
    labels = torch.zeros(config.batch_size, dtype=torch.long) if cell.task == "classify" else ids
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    _, _, peak = tracked_step(model, optimizer, batch)
    return int(peak["Total"])


def peak_of_pretraining(cell: Cell, grid: Grid) -> int:
    """Bytes for a pretraining cell; tensors have no contents, but for :data:`READS_CONTENTS`."""
    prepare("8-bit AdamW")
    real = method_name(cell.optimizer.name, cell.settings) in READS_CONTENTS
    config = llama_config(cell.model, vocab_size=_vocabulary(grid.data), max_seq_len=grid.data.seq_len)
    dtype = torch.bfloat16 if cell.bf16_weights else torch.float32
    with nullcontext() if real else fake_tensors(), set_stance("force_eager"):
        model = build_llama(config, seed=cell.seed, dtype=dtype)
        model.train()
        # stochastic rounding holds nothing, and its keys need contents
        optimizer = build_optimizer(model, replace(cell.optimizer, stochastic_rounding=False))
        make_state(optimizer, real)
        ids = torch.zeros(grid.data.batch_size, grid.data.seq_len, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=cell.autocast):
            batch = {"input_ids": ids, "labels": ids}
            _, _, peak = tracked_step(model, optimizer, batch, steps=cell.optimizer.name != COMPILED)
    return int(peak["Total"])


@cache
def _vocabulary(data: DataConfig) -> int:
    return int(load_data(data).vocab_size)


if __name__ == "__main__":
    main()
