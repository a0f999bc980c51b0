"""Every rank records what one process with the joint batches would."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from grass.diagnostics import SelectionHistory
from tests.compact_mode.networks import converted, train
from tests.distributed.training import joint_batches, train_jointly
from tests.distributed.world import run_world


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
