"""State has the keys that :mod:`grass.state.schema` declares, and no others."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import grass
from grass.state.schema import HOST_KEYS, KEYS, SHARDED_KEYS
from tests.compact_mode.networks import batches, converted, train

PACKAGE = Path(grass.__file__).parent
SETTINGS = {
    "reset": {"state_policy": "reset"},
    "bank": {"state_policy": "bank", "bank_dtype": "bfloat16"},
    "8bit": {"moment_dtype": "8bit"},
    "replacement": {"selection": "multinomial_norm", "replacement": True},
}
SHAPES = {"r": 2, "n": 6, "m": 8}


def sizes(shape: str) -> tuple[int, ...]:
    """The shape that a key declares, as numbers."""
    names = [part for part in shape.strip("()").split(", ") if part]
    return tuple(SHAPES[name.strip(",")] for name in names)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_dense_state(settings: dict) -> None:
    weight = nn.Parameter(torch.randn(8, 6))
    optimizer = grass.GrassAdamW([weight], rank=2, dim=0, update_interval=2, **settings)
    for _ in range(5):
        weight.grad = torch.randn(8, 6)
        optimizer.step()
    state = optimizer.state[weight]
    assert state.keys() <= KEYS.keys()
    for name, value in state.items():
        key = KEYS[name]
        assert isinstance(value, torch.Tensor) == bool(key.shape)
        dtype = {"moment_dtype": None, "bank_dtype": "bfloat16"}.get(key.dtype, key.dtype)
        assert dtype is None or dtype in (str(getattr(value, "dtype", "")).removeprefix("torch."), type(value).__name__)
        assert "ceil" in key.shape or not key.shape or tuple(value.shape) == sizes(key.shape)


def test_compact_state() -> None:
    model, optimizer = converted(state_policy="bank")
    train(model.bfloat16().float(), optimizer, batches(5))
    assert all(state.keys() <= KEYS.keys() for state in optimizer.state.values())


def test_code_uses_declared_keys_only() -> None:
    used = set()
    for folder in ("state", "stepping", "compact_mode"):
        for path in (PACKAGE / folder).glob("*.py"):
            used |= set(re.findall(r"\bstate\[\"(\w+)\"\]", path.read_text()))
    assert {"exp_avg", "indices"} <= used <= KEYS.keys()


def test_places() -> None:
    assert {"bank_exp_avg", "bank_exp_avg_sq", "bank_steps"} == HOST_KEYS
    assert {"exp_avg", "exp_avg_sq", "bank_exp_avg", "bank_exp_avg_sq"} == SHARDED_KEYS
