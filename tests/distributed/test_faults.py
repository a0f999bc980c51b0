"""What goes wrong on one rank is an error on every rank, and not because a wait times out."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from grass import Selection, register_rule
from grass.distributed import ReducedAllreduceState
from tests.compact.networks import converted
from tests.distributed.training import dense, joint_batches, train_jointly
from tests.distributed.world import HANG, attempt_world, run_world


def lopsided(norms: Tensor, rank: int, generator: torch.Generator | None, replacement: bool) -> Selection:
    """Rank 2 chooses other rows than the others."""
    first = int(dist.get_rank() == 2)
    return Selection(torch.arange(first, first + rank))


register_rule("lopsided", lopsided)


def other_seed(rank: int) -> None:
    model, optimizer = converted(torch.float64)
    optimizer.param_groups[0]["seed"] = 5 if rank == 1 else 0
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(1))


def other_seed_dense(rank: int) -> None:
    model, optimizer = dense(seed=5 if rank == 1 else 0)
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(1))


def other_rank(rank: int) -> None:
    ReducedAllreduceState(dense(rank=4 if rank == 1 else 3)[1])


def other_rank_compact(rank: int) -> None:
    DistributedDataParallel(converted(torch.float64, rank=4 if rank == 1 else 3)[0])


def other_age(rank: int) -> None:
    model, optimizer = converted(torch.float64)
    saved = optimizer.state_dict()
    ddp = DistributedDataParallel(model)
    train_jointly(ddp, optimizer, joint_batches(2))
    optimizer.load_state_dict(optimizer.state_dict() if rank == 1 else saved)
    train_jointly(ddp, optimizer, joint_batches(1))


def other_rows(rank: int) -> None:
    model, optimizer = converted(torch.float64, selection="lopsided")
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(4))


def other_rows_dense(rank: int) -> None:
    model, optimizer = dense(selection="lopsided")
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(1))


def other_rows_sharded_bank(rank: int) -> None:
    """How many bytes are exchanged depends on the rows: the difference shows before."""
    model, optimizer = converted(torch.float64, selection="lopsided", state_policy="bank", shard_bank=True)
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(4))


def other_layout_of_bank(rank: int) -> None:
    model, optimizer = converted(torch.float64, state_policy="bank", shard_bank=rank == 1)
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(1))


def part_of_a_bank(rank: int) -> None:
    """What was saved by one of two ranks alone does not load in a process of its own."""
    model, optimizer = converted(torch.float64, state_policy="bank", shard_bank=True)
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(1))
    alone, other = converted(torch.float64, state_policy="bank")
    other.load_state_dict(optimizer.state_dict())
    del alone


def dying(rank: int) -> None:
    model, optimizer = converted(torch.float64)
    ddp = DistributedDataParallel(model)
    for step, batch in enumerate(joint_batches()):
        if (rank, step) == (1, 2):
            os._exit(1)
        train_jointly(ddp, optimizer, [batch])


@pytest.mark.parametrize(
    ("body", "size", "message"),
    [
        (other_seed, 2, "ValueError: The ranks differ in seed of group 0: 0 on ranks [0]; 5 on ranks [1]"),
        (other_seed_dense, 2, "ValueError: The ranks differ in seed of group 0: 0 on ranks [0]; 5 on ranks [1]"),
        (other_rank, 4, "ValueError: The ranks differ in rank of group 0: 3 on ranks [0, 2, 3]; 4 on ranks [1]"),
        (other_rank_compact, 2, "params"),
        (other_age, 2, "ValueError: The ranks differ in the age of"),
        (other_rows, 4, "RuntimeError: Ranks [2] have selected other rows than the 3 other ranks"),
        (other_rows_sharded_bank, 4, "RuntimeError: Ranks [2] have selected other rows than the 3 other ranks"),
        (other_layout_of_bank, 2, "ValueError: The ranks differ in shard_bank of group 0: False on ranks [0]; True on"),
        (part_of_a_bank, 2, "save and load by torch.distributed.checkpoint"),
        (other_rows_dense, 4, "RuntimeError: Ranks [2] have selected other rows than the 3 other ranks"),
    ],
)
def test_every_rank_says_what_differs(body: object, size: int, message: str) -> None:
    for outcome in attempt_world(body, size):
        assert outcome.error != HANG
        assert message in outcome.error


def test_a_rank_that_dies() -> None:
    survivor, dead = attempt_world(dying, 2)
    assert dead.error == "died"
    assert "RuntimeError" in survivor.error


def alone_in_a_group(rank: int) -> list[list[int]]:
    """Each rank trains a model of its own."""
    model, optimizer = converted(torch.float64, seed=rank)
    optimizer.process_group = [dist.new_group([r]) for r in range(2)][rank]
    train_jointly(model, optimizer, joint_batches())
    return model.mix.selected.tolist()


def test_ranks_that_train_apart() -> None:
    first, second = run_world(alone_in_a_group, 2)
    assert first != second
