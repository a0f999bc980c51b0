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
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""In float64 only the order of sums differs."""

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


class Strata(nn.Module):
    """A linear layer of one process as the sum of layers over block columns, each with rows of its own."""

    def __init__(self, linear: nn.Linear, strata: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for columns in linear.weight.detach().chunk(strata, dim=1):
            block = nn.Linear(columns.shape[1], columns.shape[0], bias=False, dtype=columns.dtype)
            block.weight.data.copy_(columns)
            self.blocks.append(block)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = sum(block(part) for block, part in zip(self.blocks, x.chunk(len(self.blocks), dim=-1), strict=True))
        return y if self.bias is None else y + self.bias

    def matrix(self) -> Tensor:
        return torch.cat([block.weight.detach() for block in self.blocks], dim=1)


def one_process(strata: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train with strata in one process: draws are those of the grid's layers, whose places differ."""
    places = places_on_a_grid()
    model = decoder()
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    for name in linears:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Strata(model.get_submodule(name), strata))
    grass.compact(model, **ROWS)
    for number, name in enumerate(linears):
        for stratum, block in enumerate(model.get_submodule(name).blocks):
            block.first_draw = 0, number + (stratum << 24)
            block.place = lambda position, key=places[name] + (stratum << 24): key
            block.restore(*torch.split(block.draw_first(), block.counts()))
    optimizer = GrassAdamW(model, **OPTIONS, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        plain_loss(model, ids(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    state = {name: value for name, value in model.state_dict().items() if ".blocks." not in name}
    return {**state, **{f"{name}.weight": model.get_submodule(name).matrix() for name in linears}}


def places_on_a_grid() -> dict[str, int]:
    """Each layer's place among the parameters that train."""
    model = decoder()
    grass.compact(model, **ROWS)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {name.removesuffix(".active"): place for place, name in enumerate(names)}


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


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        pytest.param((2, 2), {}, id="2x2"),
        pytest.param((2, 2), {"panels": 2, "cache_panels": True}, id="cached", marks=pytest.mark.slow),
        pytest.param((4, 1), {}, id="4x1", marks=pytest.mark.slow),
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
