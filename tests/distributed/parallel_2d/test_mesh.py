"""The grid's collectives, several on their way at a time."""

from __future__ import annotations

import pytest
import torch

from grass.distributed.parallel_2d.mesh import Grid, arrived
from tests.distributed.parallel_2d.decoders import mesh_of
from tests.distributed.world import run_world

ROUNDS = 400


def gather_many(rank: int) -> bool:
    """Two gathers along the row and two along the column are on their way; each brings what was sent into it."""
    grid = Grid(mesh_of(2, 2))
    row, column = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
    for number in range(ROUNDS):
        sent = [torch.full((12, 4), 10.0 * number + 1000.0 * i + rank) for i in range(4)]
        gathers = (grid.gather_row, grid.gather_column) * 2
        coming = [gather(x) for gather, x in zip(gathers, sent, strict=True)]
        for i, (x, ranks) in enumerate(zip(coming, (row, column) * 2, strict=True)):
            expected = torch.tensor([10.0 * number + 1000.0 * i + other for other in ranks])
            assert torch.equal(arrived(x), expected[:, None, None].expand(2, 12, 4))
    return True


@pytest.mark.slow
def test_gathers_on_their_way_do_not_mix() -> None:
    assert all(run_world(gather_many, 4))
