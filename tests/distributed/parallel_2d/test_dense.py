"""Dense mode on a grid equals one process whose layers have the same strata."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from tests.distributed.parallel_2d.decoders import decoder, on_grid, whole
from tests.distributed.parallel_2d.test_compact import STEPS, train_plain, train_step
from tests.distributed.strata import EXACT, split, whole_state
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

CASES: list[dict[str, Any]] = [
    {},
    {"selection": "top_r", "explore": 0.25},
    {"selection": "multinomial_norm", "state_policy": "bank", "dim": 0},
]
OPTIONS: dict[str, Any] = {"rank": 0.25, "lr": 1e-2, "update_interval": 2}


def one_process(options: dict[str, Any]) -> dict[str, Tensor]:
    model = decoder()
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    strata = split(model, dict.fromkeys(linears, 2), options.get("dim", 1))
    optimizer = GrassAdamW(strata.groups(model), **OPTIONS, **options)
    with strata.draws():
        train_plain(model, optimizer)
    return whole_state(model)


def trained(rank: int) -> list[dict[str, Tensor]]:
    every = []
    for options in CASES:
        model = on_grid(decoder(), 2, 2)
        settings = {**OPTIONS, **options}
        optimizer = GrassAdamW(grass.param_groups(model, settings.pop("rank")), **settings)
        for step in range(STEPS):
            train_step(model, optimizer, step)
        every.append(whole(model.state_dict()))
    return every


@pytest.mark.slow
def test_equals_one_process_with_the_same_strata() -> None:
    ranks = run_world(trained, 4)
    for number, options in enumerate(CASES):
        expected = one_process(options)
        for every in ranks:
            assert_close(every[number], expected, **EXACT)


def test_the_reference_trains() -> None:
    """The reference moves all of its layers, or the comparison would say little."""
    before = decoder().state_dict()
    after = one_process(CASES[0])
    assert all(not torch.equal(before[name], after[name]) for name in before)
