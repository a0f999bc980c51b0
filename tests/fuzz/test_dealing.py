"""However a batch is dealt, and wherever a run begins, it trains as one process with the whole batch."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.distributed.uneven.test_exact import THIRDS, assert_trained_as_one, by_ddp
from tests.distributed.uneven.training import BATCH, one_process
from tests.distributed.world import run_world

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) in (1, 2, 4, BATCH))
"""Samples of each rank in a micro-batch, of which a batch has some."""


@pytest.mark.slow
@given(
    SIZES,
    st.sampled_from(["compact", "adamw"]),
    st.sampled_from(["uniform", "balanced", "multinomial_norm", "top_r"]),
    st.fixed_dictionaries({"clip": st.booleans(), "start": st.integers(0, 7), "shuffle": st.booleans()}),
)
@settings(max_examples=8)
def test_dealt_batches(sizes: list[int], mode: str, selection: str, options: dict[str, Any]) -> None:
    every = run_world(by_ddp, len(sizes), mode, selection, tuple(sizes), options)
    tolerance = THIRDS if len(sizes) == 3 else {}
    assert_trained_as_one(every, one_process(mode, selection, **options), **tolerance)
