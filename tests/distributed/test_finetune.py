"""``scripts/finetune.py`` under torchrun: as on one process with the joint batch, and it stops and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.world import LIMIT, TORCHRUN
from tests.training.runs import without_dropout

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"
FLAGS = ["classify", "--model", "tiny", "--max-length", "32", "--lr", "1e-3", "--update-interval", "3"]
FLAGS += ["--use-cpu", "True", "--logging-steps", "1", "--save-strategy", "no", "--max-steps", "6"]

STOPPING = f"""
import os, runpy, signal, sys
from transformers import Trainer

sys.path.insert(0, {str(SCRIPT.parent)!r})
step = Trainer.training_step

def training_step(trainer, *args, **keywords):
    if trainer.state.global_step == 2 and trainer.args.process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(trainer, *args, **keywords)

Trainer.training_step = training_step
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
"""Runs the script, and asks rank 1 alone to stop in the third step."""


def run(launcher: list[str], script: Path, out: Path, batch_size: int, *flags: str) -> str:
    command = [*launcher, str(script), *FLAGS, "--out", str(out), "--per-device-train-batch-size", str(batch_size)]
    done = subprocess.run([*command, *flags], check=True, timeout=LIMIT, stdout=subprocess.PIPE, text=True)
    return done.stdout


@pytest.mark.slow
def test_two_processes_train_as_one_stop_and_go_on(tmp_path: Path) -> None:
    base, one, two, stopped = (tmp_path / name for name in ("base", "one", "two", "stopped"))
    run([sys.executable], SCRIPT, base, 8)
    model = ["--model", str(without_dropout(base / "base"))]
    run([sys.executable], SCRIPT, one, 8, *model)
    assert run(TORCHRUN, SCRIPT, two, 4, *model).count("\neval_loss ") == 1, "one process says what was found"
    logs = [pd.read_csv(out / "metrics.csv", index_col="step") for out in (one, two)]
    measures = ["loss", "grad_norm", "grass_coverage"]
    pd.testing.assert_frame_equal(logs[0][measures], logs[1][measures], rtol=1e-4)  # float32, sums in another order

    stopping = tmp_path / "stopping.py"
    stopping.write_text(STOPPING)
    resuming = f"--resume-from-checkpoint {stopped / 'checkpoint-3'}"
    rarely = ["--logging-steps", "5"]  # they agree after each step, logged or not
    assert run(TORCHRUN, stopping, stopped, 4, *model, *rarely).count(f"{resuming} goes on from there") == 1
    run(TORCHRUN, SCRIPT, stopped, 4, *model, *resuming.split())
    expected, found = (load_file(out / "model.safetensors") for out in (two, stopped))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
