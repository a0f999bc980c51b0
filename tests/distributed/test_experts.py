"""Experts under DDP, where a rank may have no tokens for one, and spread over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import grass
from grass import GrassAdamW
from tests.distributed.world import run_world
from tests.experts.models import OUTER, Experts

STEPS = 6


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Tokens of all ranks and the expert of each; in some steps nobody has tokens for expert 2."""
    generator = torch.Generator().manual_seed(step)
    expert = torch.randint(4, (20,), generator=generator)
    expert[:10][expert[:10] == 0] = 1  # the first rank has none for expert 0
    if step % 2:
        expert[expert == 2] = 3
    return torch.randn(20, OUTER, generator=generator, dtype=torch.float64), expert


def loss_of(model: Any, x: Tensor, expert: Tensor) -> Tensor:
    expert, order = expert.sort(stable=True)
    ends = expert.bincount(minlength=4).cumsum(0)
    loss: Tensor = (model(x[order], ends) - x[order].roll(1, 1)).square().sum()
    return loss


def built(mode: str, selection: str) -> tuple[Any, GrassAdamW]:
    torch.manual_seed(0)
    model = Experts()
    options: dict[str, Any] = {"lr": 1e-2, "update_interval": 2, "selection": selection}
    if mode == "dense":
        return model, GrassAdamW(grass.param_groups(model, rank=3, explore=2, **options))
    grass.compact(model, rank=3, explore=2)
    return model, GrassAdamW(model, **options)


CASES = [("dense", "uniform"), ("dense", "top_r"), ("compact", "uniform"), ("compact", "multinomial_norm")]


def alone() -> list[list[Tensor]]:
    trained = []
    for case in CASES:
        model, optimizer = built(*case)
        for step in range(STEPS):
            (loss_of(model, *tokens(step)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach().clone() for p in (model.up, model.down)])
    return trained


def together(rank: int) -> list[list[Tensor]]:
    trained = []
    for case in CASES:
        model, optimizer = built(*case)
        ddp = DistributedDataParallel(model)
        for step in range(STEPS):
            x, expert = tokens(step)
            own = slice(10 * rank, 10 * rank + 10)
            loss_of(ddp, x[own], expert[own]).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach().clone() for p in (model.up, model.down)])
    return trained


def test_ddp_equals_one_process() -> None:
    expected = alone()
    for trained in run_world(together, 2):
        for ours, theirs in zip(trained, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)  # float64, sums in another order


class Half(nn.Module):
    """Two of four experts, and the sum of all ranks' outputs."""

    grass_experts = Experts.grass_experts

    def __init__(self, whole: Experts, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.up = nn.Parameter(whole.up.detach()[2 * rank : 2 * rank + 2].clone())
        self.down = nn.Parameter(whole.down.detach()[2 * rank : 2 * rank + 2].clone())

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        first = int(ends[1]) * self.rank
        own = x[first : int(ends[2 * self.rank + 1])]
        return Experts.forward(self, own, ends[2 * self.rank : 2 * self.rank + 2] - first)  # type: ignore[arg-type]


def spread(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Half(Experts(), rank)
    grass.compact(model, rank=3, explore=0)
    rows = [layer.chosen.clone() for layer in model.modules() if hasattr(layer, "active")]
    optimizer = GrassAdamW(model, lr=1e-2)
    groups = [dist.new_group([each]) for each in range(2)]
    optimizer.process_group = groups[rank]  # the ranks hold different experts
    for step in range(STEPS):
        x, expert = tokens(step)
        expert, order = expert.sort(stable=True)
        ends = expert.bincount(minlength=4).cumsum(0)
        first, last = (int(ends[1]), len(x)) if rank else (0, int(ends[1]))
        loss = (model(x[order], ends) - x[order].roll(1, 1)[first:last]).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in (model.up, model.down)], rows


def test_expert_parallel_equals_one_process() -> None:
    halves = run_world(spread, 2)
    torch.manual_seed(0)
    model = Experts()
    grass.compact(model, rank=3, explore=0)
    for number, layer in enumerate(layer for layer in model.modules() if hasattr(layer, "active")):
        size = layer.shape[layer.dim] // 2
        layer.restore(torch.cat([half[1][number] + i * size for i, half in enumerate(halves)]), None)
    optimizer = GrassAdamW(model, lr=1e-2)
    for step in range(STEPS):
        loss_of(model, *tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, whole in enumerate((model.up, model.down)):
        joined = torch.cat([half[0][number] for half in halves])
        torch.testing.assert_close(joined, whole.detach(), rtol=1e-9, atol=1e-10)


def sharded(rank: int) -> str:
    from torch.distributed.fsdp import fully_shard

    model = Experts()
    fully_shard(model)
    optimizer = GrassAdamW(grass.param_groups(model, rank=3))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_sharded_experts_are_refused() -> None:
    assert all("cannot be sharded" in message for message in run_world(sharded, 2))


def test_the_reduced_all_reduce_is_refused() -> None:
    from grass.distributed import ReducedAllreduceState

    _, optimizer = built("dense", "uniform")
    with pytest.raises(ValueError, match="does not take experts"):
        ReducedAllreduceState(optimizer)
