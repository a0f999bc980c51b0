"""A moments bank divided among the ranks of DDP: it trains as one copy on each does, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from grass import GrassAdamW
from grass.distributed import ReducedAllreduceState, reduced_allreduce_hook
from grass.distributed.traffic import recorded_traffic
from grass.memory import state_bytes
from grass.state import bank_exchange
from grass.state.bank import Share
from tests.compact_mode.networks import converted, selections, train
from tests.distributed.training import OPTIONS, assert_close, dense, joint_batches, train_jointly, weights
from tests.distributed.world import run_world

RULES: list[dict[str, Any]] = [
    {"build": converted, "selection": "multinomial_norm", "dim": 1},
    {"build": converted, "selection": "top_r", "dim": 0, "bank_dtype": "bfloat16"},
    {"build": dense, "selection": "multinomial_norm", "replacement": True, "dim": "auto"},
    {"build": dense, "selection": "uniform", "dim": 1},
]
COMPACT_AND_DENSE = [RULES[0], RULES[2]]
FLOAT32: list[dict[str, Any]] = [
    {"build": converted, "selection": "multinomial_norm", "dim": 0, "fused": True},
    {"build": converted, "selection": "multinomial_norm", "dim": 1, "moment_dtype": "8bit"},
    {"build": converted, "selection": "uniform", "dim": 1, "moment_dtype": "bfloat16", "bank_dtype": "bfloat16"},
    {"build": dense, "selection": "top_r", "dim": 1, "moment_dtype": "8bit"},
]


def built(dtype: torch.dtype = torch.float64, **rule: Any) -> tuple[nn.Module, GrassAdamW]:
    options = {**OPTIONS, "update_interval": 2, "state_policy": "bank", **rule}
    return options.pop("build")(dtype, **options)


def wrapped(model: nn.Module, optimizer: GrassAdamW) -> DistributedDataParallel:
    """Under DDP, dense mode with the hook."""
    ddp = DistributedDataParallel(model)
    if optimizer.param_groups[0]["rank"] is not None:
        ddp.register_comm_hook(ReducedAllreduceState(optimizer), reduced_allreduce_hook)
    return ddp


def trained(dtype: torch.dtype, **rule: Any) -> tuple[nn.Module, GrassAdamW]:
    model, optimizer = built(dtype, **rule)
    train_jointly(wrapped(model, optimizer), optimizer, joint_batches(5, dtype))
    return model, optimizer


def whole_bank(optimizer: GrassAdamW) -> list[Tensor]:
    """The bank as ``state_dict`` has it, put together."""
    states = optimizer.state_dict()["state"].values()
    values = [v for state in states for key, v in sorted(state.items()) if key.startswith("bank")]
    return [getattr(value, "full_tensor", lambda value=value: value)() for value in values]


def compared(rank: int, *parts: tuple[torch.dtype, list[dict[str, Any]]]) -> list[dict[str, Tensor]]:
    """Each rule with a bank of its own on each rank and with one for all; returns the weights of the latter."""
    results = []
    for dtype, rules in parts:
        for rule in rules:
            (model, optimizer), (shared, shares) = trained(dtype, **rule), trained(dtype, **rule, shard_bank=True)
            for name, value in weights(model).items():
                assert torch.equal(weights(shared)[name], value), (rule, name)
            for ours, theirs in zip(whole_bank(shares), whole_bank(optimizer), strict=True):
                assert torch.equal(ours, theirs), rule
            for (key, ours), (_, theirs) in zip(moments(shares), moments(optimizer), strict=True):
                assert torch.equal(ours, theirs), (rule, key)
            results.append(weights(shared))
    return results


def moments(optimizer: GrassAdamW) -> list[tuple[str, Tensor]]:
    """What is not in the bank, of all projected weights."""
    keys = ("exp_avg", "exp_avg_sq", "row_steps", "indices")
    return [(key, state[key]) for state in optimizer.state.values() if "indices" in state for key in keys]


@pytest.mark.slow
def test_equals_a_bank_where_a_rank_has_no_share() -> None:
    """Of 12 columns, on 5 ranks."""
    run_world(compared, 5, (torch.float64, COMPACT_AND_DENSE))


@pytest.mark.slow
def test_equals_a_bank_on_every_rank_and_one_process() -> None:
    ranks = run_world(compared, 2, (torch.float64, RULES), (torch.float32, FLOAT32))
    for rule, *results in zip(RULES, *ranks, strict=False):
        model, optimizer = built(**rule)
        train(model, optimizer, joint_batches(5))
        for ours in results:
            assert_close(ours, weights(model))


def host_bytes(rank: int) -> list[int]:
    """Without and with ``shard_bank``."""
    return [state_bytes(trained(torch.float64, **RULES[0], shard_bank=s)[1]).host for s in (False, True)]


def test_host_memory_of_a_rank() -> None:
    """The 12, 20 and 16 columns, of 20, 16 and 8 values, divide by 4."""
    whole = 2 * 4 * (12 * 20 + 20 * 16 + 16 * 8) + 4 * (12 + 20 + 16)
    assert run_world(host_bytes, 4) == [[whole, whole // 4]] * 4


def traffic(rank: int) -> list[tuple[int, int]]:
    """Bytes handed to ``all_to_all`` in four steps, and bytes of the columns of this rank's that enter in each.

    First all weights at once, then one by one.
    """
    counted = []
    for bank_exchange.BATCH in (2**20, 1):
        model, optimizer = built(**RULES[0], shard_bank=True)
        ddp = DistributedDataParallel(model)
        for data in joint_batches(4):
            before = selections(model)
            with recorded_traffic() as counts:
                train_jointly(ddp, optimizer, [data])
            own = 0
            for old, new, size, width in zip(before, selections(model), (12, 20, 16), (20, 16, 8), strict=True):
                entering = torch.tensor(sorted(set(new) - set(old)), dtype=torch.int64)
                own += (8 * width + 4) * int((Share(size, rank, 2).owner(entering) == rank).sum())
            counted.append((counts.get("all_to_all", 0), own))
    return counted


def test_only_what_enters_is_communicated() -> None:
    """Each rank hands over its part once for each of the 2; at the first refresh too."""
    for counted in run_world(traffic, 2):
        assert all(sent == 2 * own for sent, own in counted)
        assert [sent > 0 for sent, _ in counted] == [False, True] * 4


def checkpointed(rank: int, folder: Path) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
    """Train with a checkpoint after five steps; returns where that ends."""
    ends = []
    for number, rule in enumerate(COMPACT_AND_DENSE):
        model, optimizer = built(**rule, shard_bank=True)
        ddp, data = wrapped(model, optimizer), joint_batches(7)
        train_jointly(ddp, optimizer, data[:5])
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / str(number))
        train_jointly(ddp, optimizer, data[5:])
        ends.append((weights(model), whole_bank(optimizer)))
    return ends


def continued(rank: int, folder: Path, shard_bank: bool) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
    """Continue from the checkpoint in a fresh model."""
    ends = []
    for number, rule in enumerate(COMPACT_AND_DENSE):
        model, optimizer = built(**rule, shard_bank=shard_bank)
        ddp = wrapped(model, optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / str(number))
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        assert optimizer.param_groups[0]["shard_bank"] is shard_bank
        train_jointly(ddp, optimizer, joint_batches(7)[5:])
        ends.append((weights(model), whole_bank(optimizer)))
    return ends


@pytest.mark.slow
def test_checkpoint_across_world_sizes(tmp_path: Path) -> None:
    """To the bit on 2 ranks, whether they share a bank again or not; on 1 and 4 up to the order of summation."""
    expected = run_world(checkpointed, 2, tmp_path)[0]
    for size, shard_bank in ((1, True), (2, True), (2, False), (4, True)):
        for ends in run_world(continued, size, tmp_path, shard_bank):
            for (ours, our_bank), (theirs, bank) in zip(ends, expected, strict=True):
                assert_close(ours, theirs)
                assert size != 2 or all(torch.equal(ours[name], value) for name, value in theirs.items())
                assert size != 2 or all(map(torch.equal, our_bank, bank))


def through_other_states(rank: int) -> list[bool]:
    """What a bank is after a trip through its own state dict; the whole, on another model; one process; and back."""
    model, optimizer = trained(torch.float64, **RULES[0], shard_bank=True)
    bank, options = whole_bank(optimizer), StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: list[Any] = [get_optimizer_state_dict(model, optimizer, options=options)]
    dist.broadcast_object_list(whole)  # which rank 0 alone has

    own_model, own = built(**RULES[0], shard_bank=True)
    own.load_state_dict(optimizer.state_dict())
    other_model, other = built(**RULES[0], shard_bank=True)
    set_optimizer_state_dict(other_model, other, whole[0], options=options)
    alone_model, alone = built(**RULES[0])
    alone.process_group = [dist.new_group([r]) for r in range(2)][rank]
    set_optimizer_state_dict(alone_model, alone, whole[0], options=options)
    back_model, back = built(**RULES[0], shard_bank=True)
    back.load_state_dict(alone.state_dict())
    models = own_model, other_model, alone_model, back_model  # alive until here
    return [all(map(torch.equal, whole_bank(o), bank)) for o in (own, other, alone, back)[: len(models)]]


def test_state_dicts() -> None:
    assert run_world(through_other_states, 2) == [[True] * 4] * 2


@pytest.mark.parametrize(("size", "ranks"), [(12, 1), (12, 5), (7, 3), (1, 4), (16, 4)])
def test_shares_are_those_of_chunk(size: int, ranks: int) -> None:
    rows = torch.arange(size)
    chunks = [*rows.chunk(ranks), *[rows[:0]] * ranks][:ranks]
    for rank, chunk in enumerate(chunks):
        share = Share(size, rank, ranks)
        assert rows[share.start : share.start + share.rows].tolist() == chunk.tolist()
        assert share.owner(chunk).tolist() == [rank] * len(chunk)


def test_needs_a_bank() -> None:
    with pytest.raises(ValueError, match=r"shard_bank=True takes state_policy='bank', got 'keep'"):
        converted(state_policy="keep", shard_bank=True)
