"""Every rank records what one process with the joint batches would."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import grass
from grass import GrassAdamW
from grass.diagnostics import SelectionHistory
from tests.compact_mode.networks import Network, converted, train
from tests.distributed.training import joint_batches, train_jointly
from tests.distributed.world import run_world

OPTIONS = {"lr": 1e-2, "update_interval": 4, "selection": "top_r"}


def recorded(rank: int) -> dict[str, float]:
    model, optimizer = converted(torch.float64)
    history = SelectionHistory(optimizer)
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(), 1)
    return history.record()


def test_every_rank_records_what_one_process_would() -> None:
    model, optimizer = converted(torch.float64)
    history = SelectionHistory(optimizer)
    train(model, optimizer, joint_batches())
    for record in run_world(recorded, 2):
        assert record == pytest.approx(history.record(), rel=1e-5)


def recorded_of_shards(rank: int) -> list[tuple[dict[str, float], list[int]]]:
    """Dense mode under FSDP2, whose ranks have columns together, or rows each its own."""
    records = []
    for dim in (1, 0):
        model = Network(torch.float64)
        fully_shard(model)
        optimizer = GrassAdamW(grass.param_groups(model, 0.25), dim=dim, **OPTIONS)
        history = SelectionHistory(optimizer)
        train_jointly(model, optimizer, joint_batches())
        record = history.record()
        records.append((record, [history.mask(name).shape[1] for name in history.layers()]))
    return records


def test_sharded_weights() -> None:
    model = Network(torch.float64)
    optimizer = GrassAdamW(grass.param_groups(model, 0.25), dim=1, **OPTIONS)
    history = SelectionHistory(optimizer)
    train(model, optimizer, joint_batches())
    expected, sizes = history.record(), [history.mask(name).shape[1] for name in history.layers()]
    for (record, of_columns), (own, of_rows) in run_world(recorded_of_shards, 2):
        assert record == pytest.approx(expected, rel=1e-9)
        assert of_columns == sizes
        assert of_rows == [10, 8, 4]  # of 20, 16 and 8
        assert 0 < own["energy"] < 1
