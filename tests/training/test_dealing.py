"""How the processes of a run divide a step: equal parts, sizes, measured times; wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import grass
from grass.distributed.uneven import Deal, measuring
from training.data.blocks import PackedBatches
from training.run.config import TrainConfig
from training.run.dealing import REPLAN_EVERY, divided, interval_of, weight_of
from training.run.processes import Processes


class Clock:
    """Time that passes only where work says so."""

    now = 1.0

    def perf_counter(self) -> float:
        return self.now


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def made(sizes: tuple[int | str, ...], work: Any = None, **options: Any) -> tuple[Deal, PackedBatches]:
    """The division of one process whose batches are 6 sequences."""
    train = PackedBatches(torch.arange(501), batch_size=6, seq_len=10, seed=0)
    config = TrainConfig(out=Path(), deal=sizes, **options)
    model = torch.nn.Linear(1, 1)
    return divided(config, train, Processes(), model, adamw(model), work), train


def test_equal_parts_and_sizes() -> None:
    even, train = made((), accumulate=2)
    assert (even.division.sizes, even.division.micro_batches, train.sizes) == ((6,), 2, (6,))
    given, train = made((4,), accumulate=3)
    assert (given.division.sizes, given.division.batch, train.sizes) == ((4,), 12, (4,))


def test_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve sequences a step where memory ends at 4: three batches of 4."""
    monkeypatch.setattr(measuring, "time", clock := Clock())

    def work(size: int) -> None:
        clock.now += 1 + size
        if size > 4:
            raise torch.OutOfMemoryError

    auto, train = made(("auto",), work, accumulate=2)
    assert (auto.division.sizes, auto.division.micro_batches, train.sizes) == ((4,), 3, (4,))
    assert auto.replan_every == REPLAN_EVERY


def test_looks_at_times_where_rows_are_refreshed() -> None:
    model = torch.nn.Linear(8, 8)
    grass.compact(model, rank=0.5, targets=None)
    assert interval_of(grass.GrassAdamW(model, update_interval=7)) == 7
    assert interval_of(adamw(model)) == REPLAN_EVERY


def test_losses_weigh_as_much_as_their_sequences() -> None:
    """Means over 3, 3 and 1, 1 sequences, times these weights, are the mean over 8 in the mean of two processes."""
    from grass.machine.division import Division
    from grass.parallel.ranks import Ranks

    every = []
    for rank in range(2):
        one = Deal(Division((3, 1), 2), Ranks(None))
        one.rank = rank
        every.append(weight_of(one))
    assert every == [3 / 4, 1 / 4]


@pytest.mark.parametrize("sizes", [(3, 1), (0,), ("auto", 3), ("auto", "auto")])
def test_sizes_that_do_not_fit(sizes: tuple[int | str, ...]) -> None:
    with pytest.raises(ValueError, match="must be auto, or 1 numbers >= 1, one for each process"):
        made(sizes)


def test_streams_and_steps_in_backward() -> None:
    class Stream:
        batch_size = 6

    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"Invalid deal=\(4,\): a stream has no order to deal from"):
        divided(TrainConfig(out=Path(), deal=(4,)), Stream(), Processes(), model, adamw(model), None)
    with pytest.raises(ValueError, match="measuring would step in backward"):
        made(("auto",), step_in_backward=True)
