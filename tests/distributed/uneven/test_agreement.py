"""Replicas that have drifted apart are the first rank's after a refresh; equal ones are left as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import grass
from grass.distributed import agree, deal
from tests.compact_mode.networks import selections
from tests.distributed.uneven.training import BATCH, build, train
from tests.distributed.world import run_world


def drifting(rank: int, mode: str, streams: bool) -> list[Any]:
    """Every step of rank 1 rounds otherwise, by a millionth of a weight: the weights before and after a refresh."""
    model, optimizer = build(mode)
    stream = grass.stream(model, device="cpu", units=["model.layers"]) if streams and rank == 1 else None
    handle = agree(model, optimizer)

    def rounds(*_: Any) -> None:
        for p in model.parameters():
            if rank == 1 and p.requires_grad:
                p.detach().mul_(1 + 1e-6)

    optimizer.register_step_pre_hook(rounds)
    parallel = model if streams else DistributedDataParallel(model)
    refresh = 3 if mode == "compact" else 4  # in dense mode, a refresh begins the next step
    found = []
    for start, steps in ((0, refresh - 1), (refresh - 1, refresh), (refresh, refresh + 1)):
        train(deal((3, 1), BATCH), parallel, optimizer, start=start, steps=steps, clip=False, stream=stream)
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    handle.remove()
    return [found, selections(model) if mode == "compact" else None]


def assert_equal_after_a_refresh(first: list[Any], second: list[Any]) -> None:
    """They differ before it, and again after the next step."""
    others = [
        [name for name in a if not torch.equal(a[name], b[name])] for a, b in zip(first[0], second[0], strict=True)
    ]
    assert [len(names) > 10 for names in others] == [True, False, True]
    assert others[1] == []
    assert first[1] == second[1]


def test_replicas_are_equal_after_a_refresh() -> None:
    assert_equal_after_a_refresh(*run_world(drifting, 2, "compact", False))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "streams"), [("compact", True), ("dense", False)])
def test_a_streamed_replica_and_dense_mode(mode: str, streams: bool) -> None:
    """In dense mode, a refresh begins a step: that after the third one."""
    assert_equal_after_a_refresh(*run_world(drifting, 2, mode, streams))


def equal_ones(rank: int, agrees: bool) -> list[Any]:
    model, optimizer = build("compact", "multinomial_norm")
    if agrees:
        agree(model, optimizer)
    losses = train(deal((3, 1), BATCH), DistributedDataParallel(model), optimizer)
    return [dict(model.state_dict()), losses]


@pytest.mark.slow
def test_equal_replicas_train_on_to_the_bit() -> None:
    with_it, without = (run_world(equal_ones, 2, agrees) for agrees in (True, False))
    for found, expected in zip(with_it, without, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def drifting_without_refreshes(rank: int, optimizer: str) -> list[bool]:
    """Whether the ranks' weights are equal after each of five steps of which every second one is to send them."""
    model, _ = build("adamw")
    stepping = {"torch": torch.optim.AdamW, "grass": grass.GrassAdamW}[optimizer](model.parameters(), lr=1e-2)
    agree(model, stepping, every=2)
    found = []
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + rank)  # of unlike ranks: moments differ from the second step on
            p.detach().add_(1e-3 * rank)
        stepping.step()
        firsts = [p.detach().clone() for p in model.parameters()]
        for first in firsts:
            torch.distributed.broadcast(first, 0)
        found.append(all(torch.equal(p, first) for p, first in zip(model.parameters(), firsts, strict=True)))
    return found


@pytest.mark.parametrize("optimizer", ["torch", "grass"])
def test_optimizers_without_refreshes_agree_after_so_many_steps(optimizer: str) -> None:
    for found in run_world(drifting_without_refreshes, 2, optimizer):
        assert found[1::2] == [True, True]
    assert found[::2] == [False, False, False]  # of the second rank: the first is always its own


def test_what_has_no_replicas() -> None:
    with pytest.raises(ValueError, match="Invalid every=0: must be >= 1"):
        agree(*build("compact"), every=0)
    with pytest.raises(ValueError, match="it has none of this model's parameters"):
        agree(build("compact")[0], build("compact")[1])
