"""Whatever is done between two steps, layers that ``parallelize_module`` has divided compute what one process does."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.fuzz.divided import LAYERS, Divided, as_one_process
from tests.fuzz.lockstep import Action
from tests.fuzz.run import WRITES
from tests.fuzz.test_between_steps import BOOLS, NUMBERS, WHATS, action
from tests.fuzz.test_grid import OPTIONS, TRAIN

SETTINGS = st.builds(
    Divided,
    styles=st.tuples(*(st.sampled_from(["colwise", "rowwise", "plain"]) for _ in LAYERS)).filter(
        lambda styles: set(styles) != {"plain"}
    ),
    model=st.sampled_from(["llama", "qwen2"]),
    compact=st.sampled_from([True, True, False]),
    dim=st.sampled_from([0, 1]),
    rank=st.sampled_from([0.25, 0.5]),
    explore=st.sampled_from([0, 0.25]),
    options=OPTIONS,
)
SHARDED_TOO = [
    TRAIN,
    TRAIN,
    TRAIN,
    action("backward", number=NUMBERS),
    action("backward_of_logits", number=NUMBERS),
    action("forward_only", number=NUMBERS),
    action("step"),
    action("zero_grad", of=st.sampled_from(["model", "optimizer"]), none=BOOLS),
    action("evaluate", context=st.just("no_grad"), number=NUMBERS),
    action("write", number=NUMBERS, how=st.sampled_from([how for how in sorted(WRITES) if how != "copy_"])),
    action("set_option", key=st.just("lr"), value=st.sampled_from([1e-3, 1e-2, 0.0])),
    action("set_option", key=st.just("update_interval"), value=st.sampled_from([1, 2, 4])),
    action("checkpointing", on=BOOLS),
    action("save", full=BOOLS),
    action("load", what=WHATS),
    action("new_optimizer", loaded=BOOLS),
    action("expand", seed=st.integers(0, 3)),
]
ALONE = [
    *SHARDED_TOO,
    action("evaluate", context=st.just("inference_mode"), number=NUMBERS),
    action("freeze", number=NUMBERS, frozen=BOOLS),
    action("go_on_as_copy"),
]


@pytest.mark.slow
@given(SETTINGS, st.lists(st.one_of(ALONE), min_size=4, max_size=12))
@settings(max_examples=8)
def test_between_steps_of_divided_layers(setting: Divided, actions: list[Action]) -> None:
    as_one_process(setting, actions)


@pytest.mark.slow
@given(SETTINGS, st.lists(st.one_of(SHARDED_TOO), min_size=4, max_size=12))
@settings(max_examples=5)
def test_between_steps_beside_fsdp2(setting: Divided, actions: list[Action]) -> None:
    """In dense mode FSDP2 divides rows, as ``colwise`` does: rows of such a layer cannot be selected."""
    dim = setting.dim if setting.compact else 1
    as_one_process(replace(setting, sharded=True, dim=dim), actions)
