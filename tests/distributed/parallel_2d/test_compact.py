"""Compact mode on a grid equals one process whose layers have the same strata."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from grass.compact_mode.layer import CompactLayer
from tests.distributed.parallel_2d.decoders import decoder, ids, labels_of, on_grid, plain_loss, whole
from tests.distributed.strata import EXACT, convert, whole_state
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

LOOSER = {"rtol": 1e-8, "atol": 1e-8}
"""Four strata select one column each. Explored columns are then scaled by quotients of single entries, which magnify
what the order of sums differs by where an entry is near zero."""

STEPS = 7
ROWS = {"rank": 0.25, "explore": 0.25}
CASES: list[dict[str, Any]] = [
    {},
    {"selection": "top_r", "refresh": "exact"},
    {"selection": "multinomial_norm", "sketch_size": 3, "state_policy": "bank"},
    {"state_policy": "reset", "decay": "all", "weight_decay": 0.1},
]
OPTIONS: dict[str, Any] = {"scale": 1.0, "lr": 1e-2, "update_interval": 2}


def one_process(strata: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train with strata in one process."""
    model = decoder()
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    convert(model, dict.fromkeys(linears, strata), **ROWS)
    train_plain(model, GrassAdamW(model, **OPTIONS, **options))
    return whole_state(model)


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As :func:`train_step` in each step, in one process."""
    for step in range(STEPS):
        optimizer.zero_grad()
        plain_loss(model, ids(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def trained(rank: int, shape: tuple[int, ...], cases: list[dict[str, Any]], grid: dict[str, Any]) -> list[Any]:
    every = []
    for options in cases:
        model = on_grid(decoder(), *shape, **grid)
        grass.compact(model, **ROWS)
        optimizer = GrassAdamW(model, **OPTIONS, **options)
        for step in range(STEPS):
            train_step(model, optimizer, step)
        every.append(whole(model.state_dict()))
    return every


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The ordinary loop."""
    optimizer.zero_grad()
    model(input_ids=ids(step), labels=labels_of(ids(step))).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        pytest.param((2, 2), {}, id="2x2"),
        pytest.param((2, 2), {"panels": 2, "cache_panels": True}, id="cached"),
        pytest.param((4, 1), {}, id="4x1", marks=pytest.mark.soak),
    ],
)
def test_equals_one_process_with_the_same_strata(shape: tuple[int, ...], grid: dict[str, Any]) -> None:
    ranks = run_world(trained, 4, shape, CASES, grid)
    for number, options in enumerate(CASES):
        expected = one_process(shape[0], options)
        for every in ranks:
            assert every[number].keys() == expected.keys()
            assert_close(every[number], expected, **(EXACT if shape[0] == 2 else LOOSER))


def test_the_strata_of_the_reference_train() -> None:
    """The reference moves all of its layers, or the comparison would say little."""
    before = decoder().state_dict()
    after = one_process(2, {})
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert CompactLayer.strata == 1
