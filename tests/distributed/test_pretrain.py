"""``scripts/pretrain.py`` on several processes: as on one with the joint batch."""

from __future__ import annotations

import csv
import runpy
import shutil
import signal
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from grass.parallel.shards import is_sharded
from tests.distributed.world import HANG, LIMIT, TORCHRUN, attempt_world, run_world
from tests.training.runs import PRETRAIN, TINY
from training.run import blockwise
from training.run.checkpoint import CheckpointStore
from training.run.loop import Trainer

STEPS = 8
GRASS = ("--rank", "0.25", "--update-interval", "3", "--selection", "multinomial_norm", "--state-policy", "keep")
RUNS = {
    "adamw": ("--optimizer", "adamw"),
    "dense": (*GRASS, "--mode", "dense"),
    "compact": GRASS,
    "fsdp": (*GRASS, "--fsdp"),
    "offload": (*GRASS, "--offload"),
    "offloaded shards": (*GRASS, "--fsdp", "--offload"),
    "sharded bank": (*GRASS, "--state-policy", "bank", "--shard-bank"),
}


def pretrain(rank: int, out: Path, flags: tuple[str, ...]) -> None:
    """Run the script in this process, which may be one of several."""
    script = runpy.run_path(str(PRETRAIN))
    script["main"](["--out", str(out), *TINY, "--steps", str(STEPS), "--eval-every", "4", *flags])


def every_run(rank: int, out: Path, batch_size: int) -> None:
    for name, flags in RUNS.items():
        pretrain(rank, out / name, (*flags, "--batch-size", str(batch_size)))


def columns(path: Path) -> dict[str, list[float]]:
    rows = list(csv.DictReader((path / "metrics.csv").open()))
    return {
        name: [float(row[name]) for row in rows if row[name]] for name in ("tokens", "loss", "eval_loss", "grad_norm")
    }


def build_sharded(rank: int, flags: tuple[str, ...]) -> list[tuple[int, int]]:
    """How many layers are sharded, and how many have no memory yet, whenever a module has been sharded."""
    script, models, seen = runpy.run_path(str(PRETRAIN)), [], []
    names, materialise, shard = script["build"].__globals__, blockwise.materialise, script["shard_module"]

    def note(model: nn.Module, *others: object) -> None:
        models.append(model)
        materialise(model, *others)

    def count(module: nn.Module) -> None:
        shard(module)
        layers = [list(layer.parameters()) for layer in models[0].model.layers]
        seen.append((sum(all(map(is_sharded, p)) for p in layers), sum(all(x.is_meta for x in p) for p in layers)))

    args = script["argument_parser"]().parse_args(["--out", "unused", *TINY, "--fsdp", *flags])
    config = script["llama_config"](args.model, vocab_size=64, max_seq_len=16)
    with patch.dict(names, shard_module=count), patch.object(blockwise, "materialise", note):
        optimizer = script["optimizer_from_flags"](args, args.optimizer)
        model, _ = script["build"](args, config, optimizer, torch.device("cpu"))
    assert all(map(is_sharded, model.parameters()))
    return seen


@pytest.mark.parametrize("flags", [(), ("--optimizer", "adamw")], ids=["compact", "adamw"])
def test_no_process_ever_holds_the_whole_model(flags: tuple[str, ...]) -> None:
    """A layer is sharded before the next one has memory."""
    for seen in run_world(build_sharded, 2, flags):
        layers = len(seen) - 1
        assert layers > 1
        assert seen == [*((k, layers - k) for k in range(1, layers + 1)), (layers, 0)]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    run_world(every_run, 1, tmp_path / "one", 4)
    run_world(every_run, 2, tmp_path / "two", 2)
    for name in RUNS:
        expected, found = columns(tmp_path / "one" / name), columns(tmp_path / "two" / name)
        if name == "dense":  # of what did not travel the norm is not known
            expected.pop("grad_norm"), found.pop("grad_norm")
        for column, values in expected.items():
            torch.testing.assert_close(found[column], values, rtol=2e-3, atol=0, msg=lambda m, n=name: f"{n}: {m}")
        ours, theirs = (load_file(tmp_path / n / name / "model" / "model.safetensors") for n in ("two", "one"))
        assert ours.keys() == theirs.keys()
    sharded, whole = columns(tmp_path / "two" / "fsdp"), columns(tmp_path / "one" / "compact")
    torch.testing.assert_close(sharded, whole, rtol=2e-3, atol=0)  # one seed: the same weights and columns


def stopping(rank: int, out: Path, flags: tuple[str, ...]) -> None:
    """Rank 1 alone is asked to stop, in step 3."""
    train_step = Trainer.train_step

    def asked(trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
        if (rank, trainer.step) == (1, 2):
            signal.raise_signal(signal.SIGTERM)
        return train_step(trainer)

    with patch.object(Trainer, "train_step", asked):
        pretrain(rank, out, (*RUNS["compact"], *flags))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_all_stop_after_the_step_in_which_one_is_asked_to(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """However rarely they log."""
    run_world(stopping, 2, tmp_path, (*flags, "--log-every", "5"))
    assert CheckpointStore(tmp_path / "checkpoints").latest().name == "step-00000003"


def dealt(rank: int, out: Path, sizes: tuple[str, ...]) -> None:
    pretrain(rank, out, (*RUNS["compact"], "--deal", *sizes))


@pytest.mark.slow
def test_two_uneven_processes_train_as_one(tmp_path: Path) -> None:
    run_world(dealt, 1, tmp_path / "one", ("4",))
    run_world(dealt, 2, tmp_path / "two", ("3", "1"))
    torch.testing.assert_close(columns(tmp_path / "two"), columns(tmp_path / "one"), rtol=2e-3, atol=0)


def resumed(rank: int, out: Path, flags: tuple[str, ...]) -> None:
    pretrain(rank, out, (*RUNS["compact"], *flags, "--resume"))


@pytest.mark.slow
def test_a_run_of_two_uneven_processes_resumes_on_one_and_three(tmp_path: Path) -> None:
    """From the checkpoint of step 4; four sequences a step, also in two batches."""
    run_world(dealt, 2, tmp_path / "two", ("3", "1", "--save-every", "4", "--keep", "3"))
    expected = columns(tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000008")
    others = {1: ("--batch-size", "2", "--accumulate", "2"), 3: ("--deal", "2", "1", "1")}
    for processes, flags in others.items():
        shutil.copytree(tmp_path / "two", out := tmp_path / str(processes))
        run_world(resumed, processes, out, flags)
        assert (out / "checkpoints" / "step-00000008").exists()
        torch.testing.assert_close(columns(out), expected, rtol=2e-3, atol=0)
    for outcome in attempt_world(resumed, 1, tmp_path / "two", ("--batch-size", "3")):
        assert "SystemExit: 2" in outcome.error


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_measured_processes_train_as_one(tmp_path: Path, flags: tuple[str, ...]) -> None:
    run_world(dealt, 1, tmp_path / "one", ("4", *flags))
    run_world(dealt, 2, tmp_path / "two", ("auto", *flags))
    torch.testing.assert_close(columns(tmp_path / "two"), columns(tmp_path / "one"), rtol=2e-3, atol=0)


def test_sizes_of_other_numbers_of_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pretrain(0, tmp_path, ("--deal", "3", "1"))
    assert "Invalid deal=(3, 1): must be auto, or 1 numbers >= 1, one for each process" in capsys.readouterr().err


def with_a_nan(rank: int, out: Path) -> None:
    """Rank 1 gets a NaN loss in step 5."""
    loss = Trainer._loss

    def spoiled(trainer: Trainer, *arguments: object) -> torch.Tensor:
        return loss(trainer, *arguments) * (float("nan") if (rank, trainer.step) == (1, 4) else 1.0)

    Trainer._loss = spoiled
    pretrain(rank, out, (*RUNS["compact"], "--save-every", "2"))


@pytest.mark.slow
def test_a_nan_on_one_rank_stops_all_and_spoils_no_checkpoint(tmp_path: Path) -> None:
    for outcome in attempt_world(with_a_nan, 2, tmp_path):
        assert outcome.error != HANG
        assert "FloatingPointError: The gradient's norm is nan in step 5" in outcome.error
    newest = CheckpointStore(tmp_path / "checkpoints").latest()
    assert newest.name == "step-00000004"
    assert all(weight.isfinite().all() for weight in load_file(newest / "model.safetensors").values())


def one_step(rank: int, out: Path, flags: tuple[str, ...]) -> None:
    pretrain(rank, out, (*RUNS["compact"], "--save-every", "2", *flags))


@pytest.mark.slow
def test_another_number_of_processes_at_resume(tmp_path: Path) -> None:
    run_world(one_step, 2, tmp_path, ())
    for outcome in attempt_world(one_step, 1, tmp_path, ("--resume",)):
        assert "SystemExit: 2" in outcome.error


@pytest.mark.slow
def test_resumes_with_a_sharded_bank(tmp_path: Path) -> None:
    """From the checkpoint of step 4, to the bit."""
    flags, weights = (*RUNS["sharded bank"], "--save-every", "4", "--keep", "3"), []
    for resume in ((), ("--resume",)):
        run_world(pretrain, 2, tmp_path, (*flags, *resume))
        weights.append(load_file(tmp_path / "model" / "model.safetensors"))
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
        shutil.rmtree(tmp_path / "model")
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("compact", marks=pytest.mark.soak), "fsdp"])
def test_a_killed_worker_under_torchrun(mode: str, tmp_path: Path) -> None:
    """The agent restarts all, more than once if they miss each other, and training goes on from the last checkpoint."""
    kill = tmp_path / "kill.py"
    kill.write_text(KILLING)
    flags = (*RUNS[mode], "--save-every", "3")
    run_world(pretrain, 2, tmp_path / "whole", flags)
    command = [*TORCHRUN, "--max-restarts", "50", "--monitor-interval", "0.2", str(kill), "--resume"]
    command += ["--out", str(tmp_path / "killed"), *TINY, "--steps", str(STEPS), "--eval-every", "4", *flags]
    subprocess.run(command, check=True, timeout=LIMIT)
    assert (tmp_path / "was-killed").exists()
    whole, killed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(killed[name], value) for name, value in whole.items())


KILLING = f"""
import os, pathlib, runpy, signal, sys
sys.path.insert(0, {str(PRETRAIN.parent)!r})
from training.run.loop import Trainer

mark, step = pathlib.Path(__file__).with_name("was-killed"), Trainer.train_step

def train_step(trainer):
    if trainer.step == 5 and trainer.processes.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer)

Trainer.train_step = train_step
runpy.run_path({str(PRETRAIN)!r}, run_name="__main__")
"""
"""Runs the script, and kills rank 1 once, two steps after a checkpoint."""
