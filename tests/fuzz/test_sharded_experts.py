"""Whatever the settings, experts under FSDP2 or divided by expert train as those of one process do."""

from __future__ import annotations

import copy
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import grass
from grass import GrassAdamW
from tests.distributed.expert_parallelism import average, clip, drawing_as_ranks, loss_of, weights
from tests.distributed.test_expert_parallel import built
from tests.distributed.test_experts import go_on, made, values_of
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

STEPS = range(7)
OPTIONS = {
    "selection": st.sampled_from(["uniform", "balanced", "multinomial_norm", "top_r"]),
    "state_policy": st.sampled_from(["keep", "reset", "bank"]),
    "update_interval": st.integers(1, 4),
    "weight_decay": st.sampled_from([0.0, 0.1]),
    "sketch_size": st.sampled_from([4, 32]),
}
SETTINGS = st.fixed_dictionaries(
    {"mode": st.sampled_from(["compact", "dense"]), "dim": st.sampled_from([0, 1]), **OPTIONS}
).map(lambda chosen: chosen | ({"dim": 1} if chosen["mode"] == "dense" else {}))
ROWS = st.fixed_dictionaries({"rank": st.sampled_from([1, 0.25, 5]), "explore": st.sampled_from([0, 0.25, 3])})
ACTION = st.sampled_from(["step", "step", "step", "two micro-batches", "evaluate", "copy", "load", "expand"])
"""What is done between two steps of an ordinary loop."""


def trained(rank: int, setting: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = made(**setting, shard=True)
    go_on(model, optimizer, STEPS, rank)
    return values_of(model)


@pytest.mark.slow
@given(SETTINGS)
@settings(max_examples=8)
def test_sharded_experts(setting: dict[str, Any]) -> None:
    model, optimizer = made(**setting, shard=False)
    go_on(model, optimizer, STEPS, None)
    for found in run_world(trained, 2, setting):
        assert_close(found, values_of(model))


class DividedRun:
    """Experts in one process, or divided among ranks; ``state`` has all weights and what was seen."""

    def __init__(self, sizes: tuple[int, ...], rank: int, dim: int, rows: dict[str, Any], options: dict[str, Any]):
        self.sizes, self.rank, self.ranks = sizes, rank, math.prod(sizes)
        self.arguments = dim, rows, options
        self.model, self.optimizer = built(sizes, dim, rows, **options)

    def do(self, action: str, step: int) -> dict[str, Tensor]:
        """One action, and what has come of it."""
        norm = torch.zeros(())
        if action == "evaluate":
            with torch.no_grad():
                norm = self.mean(loss_of(self.model, step, self.rank, self.ranks))
        elif action == "copy":
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        elif action == "load":
            states = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])
            dim, rows, options = self.arguments
            self.model, self.optimizer = built(self.sizes, dim, rows, **options)
            self.model.load_state_dict(states[0])
            self.optimizer.load_state_dict(states[1])
        elif action == "expand":
            self.convert_again(step)
        else:
            norm = self.step(step, 2 if action == "two micro-batches" else 1)
        return {**weights(self.model), "norm": norm}

    def mean(self, loss: Tensor) -> Tensor:
        if self.ranks > 1:
            torch.distributed.all_reduce(loss)
        return loss / self.ranks

    def convert_again(self, seed: int) -> None:
        """With other rows, and a new optimizer."""
        dim, rows, options = self.arguments
        grass.expand(self.model)
        grass.compact(self.model, dim=dim, seed=seed, **rows)
        self.optimizer = GrassAdamW(self.model, lr=1e-2, **options)

    def step(self, number: int, batches: int) -> Tensor:
        for i in range(batches):
            loss_of(self.model, number + i, self.rank, self.ranks).backward()
        if self.ranks > 1:
            average(self.model)
        norm = clip(self.model, 0.2)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def done(rank: int, sizes: tuple[int, ...], actions: list[str], *arguments: Any) -> list[dict[str, Tensor]]:
    run = DividedRun(sizes, rank, *arguments)
    return [run.do(action, step) for step, action in enumerate(actions)]


@pytest.mark.slow
@given(
    st.sampled_from([(2,), (4,), (2, 2)]),
    st.lists(ACTION, min_size=4, max_size=10),
    st.sampled_from([0, 1]),
    ROWS,
    st.fixed_dictionaries(OPTIONS),
)
@settings(max_examples=8)
def test_experts_that_ranks_divide(
    sizes: tuple[int, ...], actions: list[str], dim: int, rows: dict[str, Any], options: dict[str, Any]
) -> None:
    if len(sizes) > 1:  # what FSDP2 has sharded is neither copied nor expanded
        actions = ["step" if action in ("copy", "expand") else action for action in actions]
    with drawing_as_ranks(sizes[-1]):
        expected = done(0, (), actions, dim, rows, options)
    for found in run_world(done, math.prod(sizes), sizes, actions, dim, rows, options):
        for action, ours, wanted in zip(actions, found, expected, strict=True):
            assert ours.keys() == wanted.keys(), action
            assert_close(ours, wanted)
