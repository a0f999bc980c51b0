"""Whatever the settings, experts under FSDP2 train as those of one process do."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from torch import Tensor

from tests.distributed.test_experts import go_on, made, values_of
from tests.distributed.training import assert_close
from tests.distributed.world import run_world

STEPS = range(7)
SETTINGS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["compact", "dense"]),
        "dim": st.sampled_from([0, 1]),
        "selection": st.sampled_from(["uniform", "balanced", "multinomial_norm", "top_r"]),
        "state_policy": st.sampled_from(["keep", "reset", "bank"]),
        "update_interval": st.integers(1, 4),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "sketch_size": st.sampled_from([4, 32]),
    }
).map(lambda chosen: chosen | ({"dim": 1} if chosen["mode"] == "dense" else {}))


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
