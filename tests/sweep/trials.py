"""Trials for the tests, and a sweep that can be killed: ``python -m tests.sweep.trials OUT``."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import grass
import grass.sweep

STEPS = 24
GRID = {"lr": [1e-2, 3e-2], "scale": [1.0, 0.5]}


def train(lr: float, scale: float, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """Fit noise with a small converted model, which is kept in the folder after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(device)
    grass.compact(model, rank=0.25, targets="all-linear")
    optimizer = grass.GrassAdamW(model, lr=lr, scale=scale, update_interval=3)
    data = torch.randn(STEPS, 8, 16)
    kept, start = folder / "kept.pt", 0
    if kept.exists():
        start, weights, state = torch.load(kept)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for step, batch in enumerate(data[start:], start + 1):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save((step, model.state_dict(), optimizer.state_dict()), kept.with_suffix(".new"))
        kept.with_suffix(".new").replace(kept)
        yield step, loss.item()


def train_slowly(lr: float, scale: float, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """:func:`train` with time to be killed in."""
    for pair in train(lr, scale, folder=folder, device=device):
        yield pair
        time.sleep(0.1)


def train_and_fail_once(lr: float, scale: float, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """:func:`train`, which one setting interrupts half way, once."""
    for step, loss in train(lr, scale, folder=folder, device=device):
        yield step, loss
        if step == STEPS // 2 and lr == GRID["lr"][0] and not (folder / "failed").exists():
            (folder / "failed").touch()
            raise RuntimeError("pretended")


def ends(how: str, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """Come to an end as asked for."""
    print(f"this one ends {how}")
    for step in range(1, 5):
        if step == 3:
            if how == "not finite":
                yield step, float("nan")
            if how == "out of memory":
                raise torch.OutOfMemoryError("pretended")
            if how == "host memory":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            if how == "error":
                raise KeyError("pretended")
            if how == "short":
                return
            if how == "exit":
                sys.exit()
            if how == "killed" or (how == "killed once" and not (folder / "killed").exists()):
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        yield step, 1 / step


def follows(level: float, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """A loss that stays where it is, forever."""
    step = 0
    while True:
        yield (step := step + 1), level


def mended(*, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """Fail once, and never again."""
    if not (folder / "failed").exists():
        (folder / "failed").touch()
        raise ValueError("pretended")
    yield 1, 0.5


def fills_the_disk(*, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """Leave room for half a line of the journal after the first step, once."""
    yield 1, 0.5
    if not (folder / "filled").exists():
        (folder / "filled").touch()
        (journal,) = folder.parent.glob("*.jsonl")
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 10,) * 2)
    yield 2, 0.25


def misused(how: str, *, folder: Path, device: str) -> object:
    """What no sweep can run."""
    return {
        "nothing": [],
        "a number": 3,
        "single values": [0.5],
        "texts": [(1, "low")],
        "from zero": [(0, 0.5)],
        "back": [(1, 0.5), (2, 0.4), (2, 0.3)],
    }[how]


def waits_for_the_other(name: str, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    """End when the other trial runs too."""
    (folder.parent / f"{name} runs").touch()
    while len(list(folder.parent.glob("* runs"))) < 2:
        time.sleep(0.01)
    yield 1, 0.5


def killed_at(chance: float, seed: int) -> partial[Iterator[tuple[int, float]]]:
    """:func:`train`, killed at random steps."""
    return partial(_killed, chance=chance, seed=seed)


def _killed(
    lr: float, scale: float, *, folder: Path, device: str, chance: float, seed: int
) -> Iterator[tuple[int, float]]:
    for step, loss in train(lr, scale, folder=folder, device=device):
        mark = folder / "killed"
        if not mark.exists() and random.Random(f"{seed} {lr} {scale} {step}").random() < chance:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield step, loss


def sweep(out: Path) -> list[dict[str, object]]:
    """The sweep that is killed: all of :data:`GRID` with :func:`train_slowly`."""
    return grass.sweep.run(train_slowly, GRID, out=out, steps=STEPS, devices=["cpu:0", "cpu:1"])


if __name__ == "__main__":
    print(sweep(Path(sys.argv[1])))


class Level:
    """A trial that is an object, and the same as a method."""

    def __init__(self, level: float) -> None:
        self.level = level

    def __call__(self, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
        return follows(self.level, folder=folder, device=device)

    def method(self, *, folder: Path, device: str) -> Iterator[tuple[int, float]]:
        return self(folder=folder, device=device)


def above_one(step: int, steps: int, loss: float, rivals: list[float]) -> bool:
    """A rule that is a function."""
    return loss > 1
