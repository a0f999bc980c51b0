"""Micro-batches that pass through the units together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from tests.distributed.world import in_own_process
from tests.offload.training import same
from tests.streaming.models import Network

UNITS, BATCHES = 5, 4


def built(**stream: Any) -> tuple[Any, GrassAdamW, grass.Stream]:
    torch.manual_seed(0)
    model = Network(UNITS, dropout=0.0)
    grass.compact(model, rank=4)
    optimizer = GrassAdamW(model, lr=1e-2, update_interval=3, offload="cpu")
    return model, optimizer, grass.stream(model, device="cpu", **stream)


def losses_of(model: nn.Module) -> Any:
    def loss_of(ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()) / BATCHES

    return loss_of


def train(together: bool, steps: int = 5, autocast: bool = False, **options: Any) -> Any:
    model, optimizer, stream = built(**options)
    totals = []
    for step in range(steps):
        batches = [torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(9 * step + i)) for i in range(4)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if together:
                totals.append(stream.step(batches, losses_of(model)).item())
            else:
                losses = []
                for batch in batches:
                    losses.append(losses_of(model)(batch))
                    losses[-1].backward()
                totals.append(torch.stack(losses).detach().sum().item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return totals, model.state_dict()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"offload_activations": True}])
def test_as_one_after_another(options: dict[str, Any], autocast: bool) -> None:
    expected = train(False, autocast=autocast)
    assert same(train(True, autocast=autocast, **options), expected)
    assert expected[0][-1] < expected[0][0]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_units_are_copied_as_often_as_for_one(count: int) -> None:
    model, _, stream = built()
    stream.step([torch.arange(8).view(1, 8)] * count, losses_of(model))
    assert stream.counts.loads == 2 * UNITS - 3


def test_one_runs_at_a_time() -> None:
    model, _, stream = built()
    running, most = [], [0]

    def noted(module: nn.Module, args: Any) -> None:
        running.append(threading.current_thread())
        most[0] = max(most[0], len(running))

    for block in model.blocks:
        block.up.register_forward_pre_hook(noted)
        block.up.register_forward_hook(lambda *_: running.pop() and None)
    stream.step([torch.arange(8).view(1, 8)] * 3, losses_of(model))
    assert most == [1]


def test_an_error_ends_all() -> None:
    model, optimizer, stream = built()
    loss_of, before = losses_of(model), threading.active_count()

    def fails(ids: Tensor) -> Tensor:
        loss = loss_of(ids)
        if ids[0, 0] == 1:
            raise ArithmeticError("this one")
        return loss

    batches = [torch.full((1, 8), i) for i in range(3)]
    with pytest.raises(ArithmeticError, match="this one"):
        stream.step(batches, fails)
    assert threading.active_count() <= before + 2  # the link's
    optimizer.zero_grad()
    assert torch.isfinite(stream.step(batches, loss_of))
    with pytest.raises(ValueError, match="at least one"):
        stream.step([], loss_of)


def test_misuse() -> None:
    model, _, stream = built()
    loss_of, batch = losses_of(model), torch.arange(8).view(1, 8)
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are disabled"):
        stream.step([batch], loss_of)
    with pytest.raises(TypeError, match="a list or a tuple"):
        stream.step(batch, loss_of)
    with pytest.raises(TypeError, match="must return a tensor"):
        stream.step([batch], lambda ids: 1.0)
    with pytest.raises(TypeError, match="must be a function, got int"):
        stream.step([batch], 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must return a scalar, got a tensor of shape \(2,\)"):
        stream.step([batch], lambda ids: loss_of(ids).repeat(2))
    with pytest.raises(ValueError, match="a loss with a gradient"):
        stream.step([batch], lambda ids: loss_of(ids).detach())
    with pytest.raises(RuntimeError, match="must not call"):
        stream.step([batch], lambda ids: stream.step([ids], loss_of))
    assert torch.isfinite(stream.step([batch], loss_of))
    stream.close()
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        stream.step([batch], loss_of)
    loss_of(batch).backward()


@pytest.mark.parametrize("before", [False, True])
@in_own_process
def test_ddp_is_refused(before: bool) -> None:
    torch.manual_seed(0)
    model: Any = Network(UNITS)
    if before:
        wrapped = nn.parallel.DistributedDataParallel(model)
        grass.stream(model, "cpu")
    else:
        grass.stream(model, "cpu")
        wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="CPUOffloadPolicy"):
        wrapped(torch.arange(8).view(1, 8))
