"""A streamed run that is killed while the host steps, and resumed, ends with the bits of one left alone."""

from __future__ import annotations

import itertools
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from grass.offload.host_copies import InPlace
from tests.offload.training import same
from tests.streaming.models import build, train
from tests.training.runs import context, finish

STEPS = 10
EVERY = 3
"""Steps between checkpoints."""
PARAMETERS = 20
"""Of all units, which the host steps each time."""


def run(folder: Path, mode: str) -> None:
    """Start or continue a run that writes a checkpoint every few steps, right after ``optimizer.step``."""
    model, optimizer = build(mode, streamed=True, offload="cpu")
    first, losses = 0, list[float]()
    if (saved := folder / "checkpoint.pt").exists():
        first, losses, *states = torch.load(saved, weights_only=False)
        for part, state in zip((model, optimizer), states, strict=True):
            part.load_state_dict(state)
    for step in range(first, STEPS):
        losses += train(model, optimizer, 1, step)
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            written = folder / "incomplete.pt"
            torch.save([step + 1, losses, model.state_dict(), optimizer.state_dict()], written)
            os.replace(written, saved)


def killed(folder: Path, mode: str, number: int) -> None:
    """As :func:`run`; the process kills itself when so many parameters have been stepped."""
    left, step = itertools.count(number, -1), InPlace.step

    def dying(*args: Any) -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        step(*args)

    InPlace.step = dying  # type: ignore[method-assign]
    run(folder, mode)


def in_process(target: Any, *args: Any) -> int:
    process = context.Process(target=target, args=args)
    process.start()
    return finish(process)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "compact", "compact over bf16"])
def test_killed_twice_and_resumed(mode: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    first, second = (draw.randrange(low * PARAMETERS, high * PARAMETERS) for low, high in ((4, 6), (2, 3)))
    print(f"{seed=}: killed after {first} and {second} parameters")
    alone, together = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    together.mkdir()
    assert in_process(run, alone, mode) == 0
    for number in (first, second):
        assert in_process(killed, together, mode, number) == -signal.SIGKILL
    left = torch.load(together / "checkpoint.pt", weights_only=False)
    assert 0 < left[0] < STEPS
    assert in_process(run, together, mode) == 0
    expected, ended = (torch.load(folder / "checkpoint.pt", weights_only=False) for folder in (alone, together))
    assert len(ended[1]) == STEPS
    assert same(ended, expected)
