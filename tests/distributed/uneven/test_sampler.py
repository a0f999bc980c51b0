"""Step ``k`` takes the same samples on any ranks, and each rank its own of them; wrong values are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from grass.distributed import deal
from grass.distributed.uneven import Deal, UnevenBatches
from grass.machine.division import Division
from grass.parallel.ranks import Ranks


def steps_of(length: int, division: Division, **options: Any) -> list[list[int]]:
    """The samples of each step of one epoch, of all ranks, without those that only keep a rank busy."""
    samplers = [UnevenBatches(length, division, rank, **options) for rank in range(len(division.sizes))]
    first, found = samplers[0].step, []
    every = [list(sampler) for sampler in samplers]
    for i in range(len(every[0])):
        step, micro_batch = divmod(i, division.micro_batches)
        if micro_batch == 0:
            found.append([])
        for sampler, lists in zip(samplers, every, strict=True):
            if not sampler.is_idle(first + step, micro_batch):
                found[-1] += lists[i]
    return found


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum),
    st.integers(1, 3),
    st.integers(1, 60),
    st.booleans(),
    st.integers(0, 12),
)
def test_same_samples_for_any_ranks(sizes, micro_batches, length, drop_last, start):
    division = Division(tuple(sizes), micro_batches)
    if length < division.batch:
        drop_last = False
    options = {"seed": 5, "drop_last": drop_last, "start": start}
    alone = steps_of(length, Division((division.batch,), 1), **options)
    assert steps_of(length, division, **options) == alone
    epoch = UnevenBatches(length, division, 0, seed=5, drop_last=drop_last)
    order = epoch.order(start // epoch.steps)
    assert sorted(order) == list(range(length))
    assert [i for step in alone for i in step] == order[start % epoch.steps * division.batch :][: sum(map(len, alone))]
    assert len(alone) == epoch.steps - start % epoch.steps


def test_sizes_and_length():
    sampler = UnevenBatches(20, Division((3, 1), 2), 0)
    assert [len(one) for one in sampler] == [3, 3, 3, 3]
    assert len(sampler) == 4
    every = UnevenBatches(20, Division((3, 1), 2), None)
    assert [len(one) for one in every] == [3, 1, 3, 1, 3, 1, 3, 1]
    assert len(UnevenBatches(20, Division((3, 1), 2), 0, start=3)) == 2


def test_epochs_follow_each_other_and_can_be_set():
    sampler = UnevenBatches(20, Division((8,), 1), 0, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(UnevenBatches(20, Division((8,), 1), 0, seed=1, start=3)) == second[1:]
    assert list(UnevenBatches(20, Division((8,), 1), 0, shuffle=False)) == [[*range(8)], [*range(8, 16)]]


def test_other_sizes_from_a_step_on():
    """Steps of which lists have been taken keep their sizes; the samples of each step stay the same."""
    samplers = [UnevenBatches(40, Division((3, 1), 2), rank) for rank in (0, 1, None)]
    expected = steps_of(40, Division((3, 1), 2))
    for sampler in samplers:
        iterator = iter(sampler)
        lists = [next(iterator)]
        assert sampler.begun == 1
        with pytest.raises(ValueError, match=r"in step 0 after 1 steps"):
            sampler.change(Division((1, 3), 2), 0)
        sampler.change(Division((1, 3), 2), 2)
        lists += iterator
        sizes = {0: [3] * 4 + [1] * 6, 1: [1] * 4 + [3] * 6, None: [3, 1] * 4 + [1, 3] * 6}[sampler.rank]
        assert list(map(len, lists)) == sizes
        assert sampler.division == Division((1, 3), 2)
    assert [i for one in lists for i in one] == [i for step in expected for i in step]
    for other in (Division((4, 4), 2), Division((4, 4), 1), Division((8,), 1)):
        with pytest.raises(ValueError, match="Cannot go from 8 samples"):
            samplers[0].change(other, 7)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"length": 7}, "7 samples do not fill one batch of 8"),
        ({"length": 0, "drop_last": False}, "0 samples do not fill one batch of 8"),
        ({"seed": -1}, "Invalid seed=-1"),
        ({"start": -1}, "Invalid start=-1"),
        ({"rank": None, "drop_last": False}, "drop_last=False"),
    ],
)
def test_wrong_values(options, error):
    with pytest.raises(ValueError, match=error):
        UnevenBatches(**{"length": 20, "division": Division((3, 1), 2), "rank": 0, **options})


def test_workers_of_a_loader():
    made = deal([4], 8)
    loader = DataLoader(torch.arange(20), batch_sampler=made.batches(20, shuffle=False), num_workers=2)
    assert [[b.tolist() for b in rounds] for rounds in made.rounds(loader)] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [12, 13, 14, 15]],
    ]


def test_other_loaders_are_refused():
    with pytest.raises(ValueError, match=r"batch_sampler=deal\.batches"):
        next(deal([4], 8).rounds(DataLoader(torch.arange(20), batch_size=4)))


def test_an_idle_rank_needs_labels():
    made = Deal(Division((0, 4), 1), Ranks(None))
    loader = DataLoader(torch.arange(20), batch_sampler=made.batches(20))
    with pytest.raises(TypeError, match="a Tensor has no labels to ignore"):
        next(made.rounds(loader))


def test_items():
    made = deal([2], 4)
    labels = torch.tensor([[1, 2, -100], [3, -100, 4]])
    assert made.items([{"labels": labels}, {"shift_labels": labels}]).item() == 2 + 4
    assert made.items([(labels,)], count=lambda batch: 3).item() == 3
    with pytest.raises(
        ValueError, match=r"cannot count what their batches predict: a tuple has no labels: pass count="
    ):
        made.items([(labels,)])
    with pytest.raises(ValueError, match="all labels are -100"):
        made.items([{"labels": labels[:, 2:]}])


@pytest.mark.parametrize(
    ("sizes", "batch", "error"),
    [
        ([3], 16, "Invalid batch=16: must be a multiple of the 3 samples"),
        ([3, 1], 16, r"Invalid sizes=\[3, 1\]: must be 1 numbers >= 0"),
        ([0], 16, r"Invalid sizes=\[0\]"),
        ([-1], 16, r"Invalid sizes=\[-1\]"),
        ([1], 0, "Invalid batch=0: must be at least the number of ranks, 1"),
    ],
)
def test_wrong_sizes(sizes, batch, error):
    with pytest.raises(ValueError, match=error):
        deal(sizes, batch)


@pytest.mark.parametrize(("sizes", "batch"), [([1.5], 3), ([True], 1), ([1], 2.0), (16, 16), ({4: 1}, 4)])
def test_sizes_that_are_no_numbers(sizes, batch):
    with pytest.raises(TypeError, match="Invalid"):
        deal(sizes, batch)


def test_repr():
    assert repr(deal([4], 8)) == "8 samples: 2 micro-batches of 4"
    assert repr(Deal(Division((3, 1), 2, (0.5, 0.25)), Ranks(None))).endswith("of 3, 1; predicted seconds 0.5, 0.25")
