"""Whatever is done between two steps, a grid computes what one process does, with kept panels or without."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.distributed.world import run_world
from tests.fuzz.grid import EVALUATIONS, OnGrid, in_lockstep
from tests.fuzz.run import WRITES
from tests.fuzz.test_between_steps import BOOLS, NUMBERS, WHATS, action

OPTIONS = st.fixed_dictionaries(
    {
        "update_interval": st.sampled_from([2, 3]),
        "selection": st.sampled_from(["uniform", "balanced", "multinomial_norm", "top_r"]),
        "state_policy": st.sampled_from(["reset", "keep", "bank"]),
        "decay": st.sampled_from(["selected", "all"]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "refresh": st.sampled_from(["sketch", "exact"]),
    }
).map(lambda d: tuple(d.items()))
SETTINGS = st.builds(
    OnGrid,
    mode=st.sampled_from(["compact", "compact", "dense", "full rank"]),
    rank=st.sampled_from([0.25, 0.5]),
    explore=st.sampled_from([0, 0.25]),
    options=OPTIONS,
)


TRAIN = action(
    "train",
    number=NUMBERS,
    steps=st.integers(1, 3),
    clip=st.sampled_from([None, 0.5]),
    batches=st.sampled_from([1, 1, 2]),
)
ACTIONS = [
    TRAIN,
    TRAIN,
    TRAIN,
    action("check", number=NUMBERS),
    action("check", number=NUMBERS),
    action("backward", number=NUMBERS),
    action("backward_later", number=NUMBERS),
    action("backward_of_logits", number=NUMBERS),
    action("forward_only", number=NUMBERS),
    action("step"),
    action("scaled", number=NUMBERS, overflows=BOOLS),
    action("zero_grad", of=st.sampled_from(["model", "optimizer"]), none=BOOLS),
    action("evaluate", context=st.sampled_from(sorted(EVALUATIONS)), number=NUMBERS),
    action("generate", length=st.integers(1, 3)),
    action("write", number=NUMBERS, how=st.sampled_from([how for how in sorted(WRITES) if how != "copy_"])),
    action("freeze", number=NUMBERS, frozen=BOOLS),
    action("set_option", key=st.just("lr"), value=st.sampled_from([1e-3, 1e-2, 0.0])),
    action("set_option", key=st.just("update_interval"), value=st.sampled_from([1, 2, 4])),
    action("checkpointing", on=BOOLS),
    action("save", full=BOOLS),
    action("load", what=WHATS),
    action("go_on_as_copy"),
    action("copied", number=NUMBERS),
    action("new_optimizer", loaded=BOOLS),
    action("expand", seed=st.integers(0, 3)),
]


@pytest.mark.soak
@given(SETTINGS, st.lists(st.one_of(ACTIONS), min_size=4, max_size=16))
@settings(max_examples=8)
def test_between_steps_on_a_grid(setting: OnGrid, actions: list[tuple[str, dict[str, Any]]]) -> None:
    assert all(run_world(in_lockstep, 4, setting, actions))
