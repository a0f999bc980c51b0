"""Dense mode under DDP with the reduced all-reduce: the same training as in one process, for fewer bytes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from grass import GrassAdamW
from grass.compact_mode.refresh_cycle import rademacher
from grass.distributed import ReducedAllreduceState, reduced_allreduce_hook
from grass.distributed.traffic import recorded_traffic
from grass.selection.draws import selection_generator
from grass.state.refresh import refresh_due
from tests.compact_mode.networks import Network, loss_of, train
from tests.distributed.training import OPTIONS, assert_close, dense, joint_batches, share, train_jointly, weights
from tests.distributed.world import run_world

TINY = 400 / 2**20
"""Megabytes of a bucket that holds a weight or two."""

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": TINY, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": TINY, "static_graph": True},
]
RULES: list[dict[str, Any]] = [
    {"selection": "top_r", "state_policy": "reset", "dim": 0},
    {"selection": "multinomial_norm", "state_policy": "keep", "dim": 1},
    {"selection": "multinomial_norm", "replacement": True, "state_policy": "bank", "dim": "auto"},
    {"selection": "uniform", "state_policy": "bank", "dim": 1, "fused": True},
    {"selection": "uniform", "state_policy": "keep", "dim": 1, "explore": 4},
    {"selection": "multinomial_norm", "state_policy": "keep", "dim": 0, "explore": 3},
]


def hooked(model: nn.Module, optimizer: GrassAdamW, refresh: str = "full", **layout: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **layout)
    ddp.register_comm_hook(ReducedAllreduceState(optimizer, refresh=refresh), reduced_allreduce_hook)
    return ddp


def every_configuration(rank: int) -> list[dict[str, torch.Tensor]]:
    trained = []
    for rule in RULES:
        for layout in LAYOUTS:
            for micro in (1, 2) if "static_graph" not in layout else (1,):
                model, optimizer = dense(**rule)
                train_jointly(hooked(model, optimizer, **layout), optimizer, joint_batches(), micro)
                trained.append(weights(model))
    return trained


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_joint_training_equals_one_process(size: int) -> None:
    ranks = run_world(every_configuration, size)
    expected = []
    for rule in RULES:
        model, optimizer = dense(**rule)
        train(model, optimizer, joint_batches())
        expected += [weights(model)] * 5
    for trained in ranks:
        for ours, theirs in zip(trained, expected, strict=True):
            assert_close(ours, theirs)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def accumulated(rank: int) -> list[list[dict[str, torch.Tensor]]]:
    """Gradients after each of two micro-batches that are both synchronised, step by step, and the final weights."""
    trained = []
    for refresh, rule in (("full", RULES[4]), ("full", RULES[5]), ("sketch", {**RULES[5], "sketch_size": 5})):
        for layout in ({}, {"gradient_as_bucket_view": True}):
            model, optimizer = dense(**rule)
            ddp, seen = hooked(model, optimizer, refresh, **layout), []
            for number, batch in enumerate(joint_batches()):
                optimizer.zero_grad(set_to_none=number % 2 == 0)
                for part in zip(*(t.chunk(2) for t in share(batch)), strict=True):
                    (loss_of(ddp, part) / 2).backward()
                seen.append(gradients(model))
                optimizer.step()
            trained.append([*seen, weights(model)])
    return trained


def estimated(exact: torch.Tensor, ours: torch.Tensor, rows: list[int], dim: int) -> torch.Tensor:
    """The exact gradient where ours is not zero, its explored rows by the factor that clipping needs."""
    chosen = (ours != 0).any(1 - dim)
    factors = chosen.to(exact)
    factors[chosen.nonzero().flatten()] = math.sqrt((len(chosen) - len(rows)) / max(1, int(chosen.sum()) - len(rows)))
    factors[torch.tensor(rows)] = 1.0
    return exact * factors.unsqueeze(1 - dim)


def test_accumulation_without_no_sync() -> None:
    """Every micro-batch counts alike: gradients of one process, with explored rows scaled once."""
    ranks = run_world(accumulated, 2)
    for number, rule in enumerate([RULES[4], RULES[4], RULES[5], RULES[5]]):
        model, optimizer = dense(**rule)
        for step, batch in enumerate(joint_batches()):
            optimizer.zero_grad()
            for micro in range(2):  # the parts that both ranks see in their first and in their second backward
                part = [torch.cat([t.chunk(4)[micro], t.chunk(4)[2 + micro]]) for t in batch]
                (loss_of(model, part) / 2).backward()
            exact = gradients(model)
            optimizer.step()
            for trained in ranks:
                for name, p in model.named_parameters():
                    ours, theirs = trained[number][step][name], exact[name]
                    if p.ndim == 2 and not (ours != 0).all():  # else a refresh, in which all rows travel
                        theirs = estimated(theirs, ours, optimizer.state[p]["indices"].tolist(), rule["dim"])
                    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
        for trained in ranks:
            assert_close(trained[number][-1], weights(model))


@pytest.mark.slow
def test_accumulation_with_sketches_keeps_the_rows_of_the_first_micro_batch() -> None:
    first = sketched_micro_batches()
    for trained in run_world(accumulated, 2):
        for number in (4, 5):
            assert_close(trained[number][-1], first)


def sketched_micro_batches() -> dict[str, torch.Tensor]:
    """One process, given the norms of the sketch of both ranks' first micro-batch."""
    model, optimizer = dense(**RULES[5], sketch_size=5)
    group = optimizer.param_groups[0]
    for batch in joint_batches():
        optimizer.zero_grad()
        for micro in range(2):
            part = [torch.cat([t.chunk(4)[micro], t.chunk(4)[2 + micro]]) for t in batch]
            (loss_of(model, part) / 2).backward()
            for p in group["params"] if micro == 0 else ():
                if refresh_due(optimizer.state.get(p, {}), group):
                    generator = selection_generator(0, -p.shape[1], optimizer.state.get(p, {}).get("refreshes", 0))
                    signs = rademacher(p.shape[1], 5, generator).to(p.dtype)
                    optimizer.given_norms[p] = torch.linalg.vector_norm(p.grad @ signs, dim=1)
        optimizer.step()
    return weights(model)


class Branched(Network):
    """A :class:`Network` with a weight that only some ranks use, one that none does, and a convolution."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.side = nn.Linear(12, 8, dtype=torch.float64)
        self.never = nn.Linear(12, 8, dtype=torch.float64)
        self.convolution = nn.Conv2d(1, 8, 2, dtype=torch.float64).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        y = super().forward(x) + self.convolution(x.view(-1, 1, 3, 4)).mean((2, 3))
        return y + self.side(x) if branch else y


def branched(rank: int | None, explore: int = 0, micro: int = 1) -> dict[str, torch.Tensor]:
    """Trained on two ranks of which the second uses the branch, in its first micro-batch; ``None``: in one process."""
    torch.manual_seed(0)
    model = Branched()
    optimizer = GrassAdamW(
        [p for p in model.parameters()], **{**OPTIONS, "rank": 3 - explore, "dim": 1, "explore": explore}
    )
    ddp = model if rank is None else hooked(model, optimizer, find_unused_parameters=True)
    for x, y in joint_batches():
        optimizer.zero_grad()
        shares = [
            list(zip(a.chunk(micro), b.chunk(micro), strict=True)) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)
        ]
        for part in range(micro):
            losses = [
                (ddp(a, i == 1 and part == 0) - b).square().mean() / micro
                for i, (a, b) in enumerate(share[part] for share in shares)
                if rank in (None, i)
            ]
            torch.stack(losses).mean().backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(("explore", "micro"), [(0, 1), (1, 2)])
def test_unused_parameters_and_channels_last(explore: int, micro: int) -> None:
    expected = branched(None, explore, micro)
    for ours in run_world(branched, 2, explore, micro):
        assert_close(ours, expected)


def sketched(rank: int | None) -> dict[str, torch.Tensor]:
    """Refreshed by sketches; in one process the optimizer is given the norms of the joint gradient's sketch."""
    model, optimizer = dense(selection="multinomial_norm", replacement=True, dim=1, sketch_size=5, seed=3)
    if rank is not None:
        train_jointly(hooked(model, optimizer, "sketch", bucket_cap_mb=TINY), optimizer, joint_batches())
        return weights(model)
    for batch in joint_batches():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for p in optimizer.param_groups[0]["params"]:
            if refresh_due(optimizer.state.get(p, {}), optimizer.param_groups[0]):
                generator = selection_generator(3, -p.shape[0], optimizer.state.get(p, {}).get("refreshes", 0))
                signs = rademacher(p.shape[0], 5, generator).to(p.dtype)
                optimizer.given_norms[p] = torch.linalg.vector_norm(p.grad.t() @ signs, dim=1)
        optimizer.step()
    return weights(model)


def test_refresh_from_a_sketch() -> None:
    expected = sketched(None)
    for ours in run_world(sketched, 2):
        assert_close(ours, expected)


def compressed(rank: int) -> list[float]:
    """The largest error of the reduced gradient, relative to its largest element, in a step between refreshes."""
    errors = []
    model, optimizer = dense(torch.float32, selection="top_r", dim=0)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(ReducedAllreduceState(optimizer), fp16_compress_wrapper(reduced_allreduce_hook))
    first, second = joint_batches(2, torch.float32)
    train_jointly(ddp, optimizer, [first])
    joint = copy.deepcopy(model)
    optimizer.zero_grad()
    loss_of(ddp, share(second)).backward()
    loss_of(joint, second).backward()
    for p, q in zip(model.parameters(), joint.parameters(), strict=True):
        expected = q.grad
        if p.ndim == 2:
            rows = optimizer.state[p]["indices"]
            expected = torch.zeros_like(q).index_copy(0, rows, q.grad[rows])
            assert p.grad.count_nonzero() <= rows.numel() * p.shape[1]
        errors.append(float((p.grad - expected).abs().max() / expected.abs().max()))
    return errors


def test_composes_with_compression() -> None:
    for errors in run_world(compressed, 2):
        assert 2**-16 < max(errors) < 2**-9  # two roundings to 11 bits and the sum


def bytes_per_step(rank: int) -> list[dict[str, int]]:
    """Of DDP's own all-reduce, then steps of a refresh and ordinary ones with full and sketched refreshes."""
    counted = []
    for refresh in (None, "full", "sketch"):
        model, optimizer = dense(torch.float32, rank=0.25, dim=1, sketch_size=2)
        ddp = DistributedDataParallel(model) if refresh is None else hooked(model, optimizer, refresh)
        train_jointly(ddp, optimizer, joint_batches(2, torch.float32))  # after the first DDP rebuilds its buckets
        optimizer.state.clear()
        for batch in joint_batches(2, torch.float32):
            optimizer.zero_grad()
            with recorded_traffic() as counts:
                loss_of(ddp, share(batch)).backward()
            optimizer.step()
            counted.append(dict(counts))
    return counted


def test_bytes_on_the_wire() -> None:
    plain = 20 + 20 + 20 + 16  # biases and the norm
    everything = 12 * 20 + 20 * 16 + 16 * 8 + plain
    rows = 3 * 20 + 5 * 16 + 4 * 8 + plain
    sketches = 2 * (12 + 20 + 16)
    for counted in run_world(bytes_per_step, 2):
        elements = [counts.pop("all_reduce") // 4 for counts in counted]
        for counts in counted:  # what is left is the comparison of settings: two numbers
            assert all(nbytes <= 16 for nbytes in counts.values())
        assert elements == [everything, everything, everything, rows, sketches + rows, rows]


def test_state_is_checked() -> None:
    _, optimizer = dense()
    with pytest.raises(ValueError, match=r"refresh='half'.*'full' or 'sketch'"):
        ReducedAllreduceState(optimizer, refresh="half")
    with pytest.raises(ValueError, match=r"needs explore below 1\.0"):
        ReducedAllreduceState(dense(explore=1.0)[1])
