"""A run that is killed and resumed ends with the same bits as one left alone."""

from __future__ import annotations

import random
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import die_saving, die_stepping, finish, logged_steps, signal_itself, start
from training.run.states import read_state

STEPS = 16
EVENTS = 16
"""Operations on files that writing a checkpoint takes, at least; deleting what is left of one takes some more."""
PARAMETERS = 38
"""Of the model, with norms, embedding and head, at least."""
COMMON = ("--steps", str(STEPS), "--save-every", "3", "--eval-every", "5", "--lr", "3e-3")
GRASS = ("--optimizer", "grass", "--mode", "dense", "--rank", "0.25", "--dim", "1", "--update-interval", "4")
SAMPLED = ("--selection", "multinomial_norm", "--weight-decay", "0.1")
RUNS = {
    "adamw": ("--optimizer", "adamw"),
    "reset": (*GRASS, "--state-policy", "reset", "--warmup-after-refresh", "3"),
    "keep": (*GRASS, *SAMPLED, "--state-policy", "keep", "--replacement"),
    "bank": (*GRASS, *SAMPLED, "--state-policy", "bank"),
    "compact": (*GRASS, *SAMPLED, "--state-policy", "keep", "--mode", "compact"),
    "bank-bf16": (*GRASS, *SAMPLED, "--state-policy", "bank", "--dtype", "bf16", "--accumulate", "2"),
}


QUICK = ("compact",)


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
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


def killed_at(out, flags, step, events):
    """Start or continue a run that dies after a step, or ``events`` into the first checkpoint from that step on."""
    spoil = partial(signal_itself, signal.SIGKILL, step) if events is None else partial(die_saving, step, events)
    assert finish(start(out, *flags, "--resume", spoil=spoil)) == -signal.SIGKILL


def test_killed_twice_and_resumed(alone, tmp_path):
    flags, expected = alone
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    first, second = draw.randrange(1, STEPS // 2), draw.randrange(STEPS // 2, STEPS - 3)
    events = draw.sample([None, draw.randrange(EVENTS)], 2)
    print(f"{seed=}: killed after steps {first} and {second}, while saving after {events} events")
    killed_at(tmp_path, flags, first, events[0])
    killed_at(tmp_path, flags, second, events[1])
    assert finish(start(tmp_path, *flags, "--resume")) == 0
    assert_same_bits(left_behind(tmp_path), expected)
    assert logged_steps(tmp_path) == list(range(1, STEPS + 1))
    assert not list(tmp_path.glob("checkpoints/.incomplete-*"))


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["adamw", "compact", "bank-bf16"], indirect=True)
def test_killed_while_the_host_steps_and_resumed(alone, tmp_path):
    """Some weights are stepped then, others are not. The run left alone is not offloaded."""
    flags, expected = alone
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    step, values = draw.randrange(4, STEPS - 1), draw.randrange(PARAMETERS)
    print(f"{seed=}: killed in the step after {step}, with {values} parameters on the device")
    spoil = partial(die_stepping, step, values)
    assert finish(start(tmp_path, *flags, "--offload", spoil=spoil)) == -signal.SIGKILL
    assert finish(start(tmp_path, *flags, "--offload", "--resume")) == 0
    assert_same_bits(left_behind(tmp_path), expected)


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["bank"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_stopped_by_a_signal_and_resumed(alone, number, tmp_path):
    flags, expected = alone
    assert finish(start(tmp_path, *flags, spoil=partial(signal_itself, number, 4))) == 0
    assert logged_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").exists()
    assert not (tmp_path / "model").exists()
    assert finish(start(tmp_path, *flags, "--resume")) == 0
    assert_same_bits(left_behind(tmp_path), expected)
