"""Rows of experts: equally many of each, by the rule of one matrix."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from grass.selection import select_rows
from grass.selection.exploration import draw_explored

SIZES = st.tuples(st.integers(2, 6), st.integers(2, 30)).flatmap(
    lambda size: st.tuples(st.just(size[0]), st.just(size[1]), st.integers(1, size[1]))
)


@given(SIZES, st.sampled_from(["uniform", "balanced", "multinomial_norm", "multinomial_norm_sq"]), st.integers(0, 9))
def test_each_expert_has_as_many_rows(sizes: tuple[int, int, int], rule: str, seed: int) -> None:
    experts, size, rank = sizes
    generator = torch.Generator().manual_seed(seed)
    norms = torch.rand(experts * size, generator=generator)
    norms[: 2 * size][:size] = 0.0  # an expert without tokens
    chosen = select_rows(norms, experts * rank, rule, generator, experts=experts).indices
    assert torch.equal(chosen, chosen.unique())
    assert (chosen // size).bincount(minlength=experts).tolist() == [rank] * experts


@given(SIZES, st.integers(0, 9))
def test_the_largest_of_each(sizes: tuple[int, int, int], seed: int) -> None:
    experts, size, rank = sizes
    norms = torch.rand(experts, size, generator=torch.Generator().manual_seed(seed))
    chosen = select_rows(norms.flatten(), experts * rank, "top_r", experts=experts).indices.view(experts, rank)
    for number, own in enumerate(norms):
        assert torch.equal(chosen[number] - number * size, select_rows(own, rank, "top_r").indices)


@given(SIZES, st.integers(0, 5))
def test_explored_rows_of_each(sizes: tuple[int, int, int], step: int) -> None:
    experts, size, rank = sizes
    count = size - rank
    if not count:
        return
    selected = select_rows(torch.ones(experts * size), experts * rank, "uniform", experts=experts).indices
    for q in {1, count}:
        drawn = draw_explored(selected, experts * size, experts * q, 0, 3, step, experts)
        assert not set(drawn.tolist()) & set(selected.tolist())
        assert torch.equal(drawn, drawn.unique())
        assert (drawn // size).bincount(minlength=experts).tolist() == [q] * experts
