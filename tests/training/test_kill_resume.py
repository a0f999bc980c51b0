"""A run that is killed and resumed ends with the same bits as one left alone."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch
from safetensors.torch import load_file

from grass.training.run.states import read_state
from tests.training.runs import finish, logged_steps, start, wait_until

STEPS = 16
COMMON = ("--steps", str(STEPS), "--save-every", "3", "--eval-every", "5", "--lr", "3e-3")
GRASS = ("--optimizer", "grass", "--rank", "0.25", "--dim", "1", "--update-interval", "4")
SAMPLED = ("--selection", "multinomial_norm", "--weight-decay", "0.1")
RUNS = {
    "adamw": ("--optimizer", "adamw"),
    "reset": (*GRASS, "--state-policy", "reset", "--warmup-after-refresh", "3"),
    "keep": (*GRASS, *SAMPLED, "--state-policy", "keep", "--replacement"),
    "bank": (*GRASS, *SAMPLED, "--state-policy", "bank"),
    "compact": (*GRASS, *SAMPLED, "--state-policy", "keep", "--compact"),
    "bank-bf16": (*GRASS, *SAMPLED, "--state-policy", "bank", "--dtype", "bf16", "--accumulate", "2"),
}


@pytest.fixture(scope="module", params=RUNS)
def alone(request, tmp_path_factory):
    """Flags of a run, and what it leaves behind when nothing disturbs it."""
    flags = (*COMMON, *RUNS[request.param])
    out = tmp_path_factory.mktemp("alone")
    assert finish(start(out, *flags)) == 0
    return flags, left_behind(out)


def left_behind(out):
    """Weights, optimizer state and logged losses at the end of a run."""
    state = read_state(out / "checkpoints" / f"step-{STEPS:08d}")
    rows = [line.split(",")[:6] for line in (out / "metrics.csv").read_text().splitlines()]
    return load_file(out / "model" / "model.safetensors"), state["optimizer"]["state"], rows


def assert_same_bits(actual, expected):
    weights, states, rows = actual
    expected_weights, expected_states, expected_rows = expected
    assert weights.keys() == expected_weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected_weights[name])] == []
    for key, state in expected_states.items():
        assert states[key].keys() == state.keys()
        for name, value in state.items():
            same = (
                torch.equal(states[key][name], value) if isinstance(value, torch.Tensor) else states[key][name] == value
            )
            assert same, (key, name)
    assert rows == expected_rows


def killed_at(out, flags, step, moment):
    """Start or continue a run, and kill it after a step, or while it writes the first checkpoint from that step on."""
    process = start(out, *flags, "--resume")
    wait_until(process, lambda: (logged_steps(out) or [0])[-1] >= step)
    if moment == "while saving":
        checkpoints = out / "checkpoints"
        wait_until(process, lambda: checkpoints.exists() and any(checkpoints.glob(".incomplete-*")))
    process.kill()
    assert finish(process) == -9


def test_killed_twice_and_resumed(alone, tmp_path):
    flags, expected = alone
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    first, second = draw.randrange(1, STEPS // 2), draw.randrange(STEPS // 2, STEPS - 3)
    moments = draw.sample(["between steps", "while saving"], 2)
    print(f"{seed=}: killed {moments[0]} after step {first}, {moments[1]} after step {second}")
    killed_at(tmp_path, flags, first, moments[0])
    killed_at(tmp_path, flags, second, moments[1])
    assert finish(start(tmp_path, *flags, "--resume")) == 0
    assert_same_bits(left_behind(tmp_path), expected)
    assert logged_steps(tmp_path) == list(range(1, STEPS + 1))
    assert not list(tmp_path.glob("checkpoints/.incomplete-*"))


@pytest.mark.parametrize("alone", ["bank"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_stopped_by_a_signal_and_resumed(alone, number, tmp_path):
    flags, expected = alone
    process = start(tmp_path, *flags)
    wait_until(process, lambda: len(logged_steps(tmp_path)) >= 4)
    os.kill(process.pid, number)
    assert finish(process) == 0
    stopped_at = logged_steps(tmp_path)[-1]
    assert stopped_at < STEPS
    assert (tmp_path / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").exists()
    assert not (tmp_path / "model").exists()
    assert finish(start(tmp_path, *flags, "--resume")) == 0
    assert_same_bits(left_behind(tmp_path), expected)
