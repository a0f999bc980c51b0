"""What goes wrong on one rank is an error on every rank, and not because a wait times out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import grass
from grass import Selection, register_rule
from grass.distributed import ReducedAllreduceState, reduced_allreduce_hook
from tests.compact_mode.networks import converted
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


CHANGES: dict[str, Any] = {
    "lr": 0.5,
    "weight_decay": 0.3,
    "betas": (0.5, 0.9),
    "eps": 1e-3,
    "scale": 7.0,
    "decay": "all",
    "maximize": True,
    "warmup_after_refresh": 3,
    "update_interval": 2,
    "selection": "uniform",
    "sketch_size": 3,
    "explore": 1,
}
"""Another value of each setting than the tests have."""


def changed(rank: int, name: str, steps: int, mode: str) -> None:
    """Rank 1 changes a setting in mid-run."""
    model, optimizer = dense(explore=2) if mode != "compact" else converted(torch.float64, selection="top_r")
    ddp = DistributedDataParallel(model)
    if mode == "hook":
        ddp.register_comm_hook(ReducedAllreduceState(optimizer), reduced_allreduce_hook)
    train_jointly(ddp, optimizer, joint_batches(steps))
    if rank == 1:
        optimizer.param_groups[0][name] = CHANGES[name]
    train_jointly(ddp, optimizer, joint_batches(1))


def attached(rank: int, name: str) -> None:
    """Rank 1 changes an option of the attachment, or a setting of the optimizer, in mid-run, or begins with another."""
    model = converted(torch.float64)[0]
    trained = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
    optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9)
    scale = 2.0 if rank == 1 and name == "scale" else 1.0
    attachment = grass.attach(optimizer, model, scale=scale, update_interval=4)
    ddp = DistributedDataParallel(model)
    train_jointly(ddp, optimizer, joint_batches(2))
    if rank == 1 and name == "momentum":
        optimizer.param_groups[0]["momentum"] = 0.5
    elif rank == 1 and name == "update_interval":
        attachment.options = replace(attachment.options, update_interval=3)
    train_jointly(ddp, optimizer, joint_batches(1))


def offloaded(rank: int) -> None:
    """Only rank 0 offloads, which makes a group of ranks."""
    model, optimizer = converted(torch.float64, **({"offload": "cpu"} if rank == 0 else {}))
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(1))


def uneven(rank: int, mode: str) -> None:
    """The first rank has fewer batches, and joins."""
    model, optimizer = dense() if mode == "dense" else converted(torch.float64)
    ddp = DistributedDataParallel(model)
    train_jointly(ddp, optimizer, joint_batches(1))
    with ddp.join():
        train_jointly(ddp, optimizer, joint_batches(2 + rank))


def redundancy_free(rank: int) -> None:
    """Torch's ZeRO gives each rank an optimizer of some layers."""
    model = converted(torch.float64)[0]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ZeroRedundancyOptimizer(trained, grass.GrassAdamW, lr=1e-2)
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(1))


def redundancy_free_dense(rank: int, alone: bool) -> dict[str, Tensor]:
    """In dense mode each rank steps its own weights, with a group of its own."""
    model, _ = dense()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), grass.GrassAdamW, lr=1e-2, rank=3)
    if alone:
        optimizer.optim.process_group = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    train_jointly(DistributedDataParallel(model), optimizer, joint_batches(3))
    return {name: p.detach() for name, p in model.named_parameters()}


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


OTHER_ROWS = "RuntimeError: Ranks [2] have selected other rows than the 3 other ranks"


@pytest.mark.parametrize(
    ("body", "size", "message"),
    [
        (other_seed, 2, "ValueError: The ranks differ in seed of group 0: 0 on ranks [0]; 5 on ranks [1]"),
        (other_seed_dense, 2, "ValueError: The ranks differ in seed of group 0: 0 on ranks [0]; 5 on ranks [1]"),
        (other_rank, 4, "ValueError: The ranks differ in rank of group 0: 3 on ranks [0, 2, 3]; 4 on ranks [1]"),
        (other_rank_compact, 2, "params"),
        (other_age, 2, "ValueError: The ranks differ in the age of"),
        (other_rows, 4, OTHER_ROWS),
        pytest.param(
            other_rows_sharded_bank,
            4,
            OTHER_ROWS,
            marks=pytest.mark.slow,
        ),
        (other_layout_of_bank, 2, "ValueError: The ranks differ in shard_bank of group 0: False on ranks [0]; True on"),
        (part_of_a_bank, 2, "save and load by torch.distributed.checkpoint"),
        (redundancy_free, 2, "RuntimeError: ZeroRedundancyOptimizer does not take compact mode"),
        (offloaded, 2, "ValueError: The ranks differ in offload: 'cpu' on ranks [0]; None on ranks [1]"),
        pytest.param(
            other_rows_dense,
            4,
            OTHER_ROWS,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_rank_says_what_differs(body: object, size: int, message: str) -> None:
    for outcome in attempt_world(body, size):
        assert outcome.error != HANG
        assert message in outcome.error


def test_redundancy_free_in_dense_mode() -> None:
    for outcome in attempt_world(redundancy_free_dense, 2, False):
        assert "set optimizer.process_group to the ranks that do" in outcome.error
    first, second = run_world(redundancy_free_dense, 2, True)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    before = dict(dense()[0].named_parameters())
    assert not any(torch.equal(value, before[name]) for name, value in first.items())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("lr", "explore") else pytest.mark.slow) for n in CHANGES]
)
def test_a_setting_changed_on_one_rank(name: str) -> None:
    """In a step that chooses no rows, and in one that does, before any rank waits for another."""
    for mode, steps in (("compact", 1), ("dense", 4), ("hook", 2)):
        if (name, mode) == ("explore", "compact"):
            continue  # the conversion has decided it
        values = dense(explore=2)[1] if mode != "compact" else converted(selection="top_r")[1]
        before, after = values.param_groups[0][name], CHANGES[name]
        for outcome in attempt_world(changed, 2, name, steps, mode):
            expected = (
                f"ValueError: The ranks differ in {name} of group 0: {before!r} on ranks [0]; {after!r} on ranks [1]"
            )
            assert expected in str(outcome.error)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("momentum", "momentum of group 0: 0.9 on ranks [0]; 0.5 on ranks [1]"),
        ("update_interval", "update_interval: 4 on ranks [0]; 3 on ranks [1]"),
        ("scale", "scale: 1.0 on ranks [0]; 2.0 on ranks [1]"),
    ],
)
def test_a_setting_of_an_attached_optimizer(name: str, found: str) -> None:
    for outcome in attempt_world(attached, 2, name):
        assert f"ValueError: The ranks differ in {found}" in str(outcome.error)


def test_a_schedule_that_all_ranks_follow() -> None:
    run_world(scheduled, 2)


def scheduled(rank: int) -> None:
    model, optimizer = converted(torch.float64)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    ddp = DistributedDataParallel(model)
    for batch in joint_batches(6):
        train_jointly(ddp, optimizer, [batch])
        scheduler.step()


@pytest.mark.parametrize("mode", ["dense", "compact"])
def test_uneven_batches(mode: str) -> None:
    for outcome in attempt_world(uneven, 2, mode):
        assert "RuntimeError: Grass cannot train inside DDP.join()" in str(outcome.error)


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
