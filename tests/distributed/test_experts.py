"""Experts under DDP, where a rank may have no tokens for one, under FSDP2, and spread over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import grass
from grass import GrassAdamW
from grass.distributed import shard_placement_fn
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
        layer.restore(torch.cat([half[1][number] + i * size for i, half in enumerate(halves)]), layer.explored)
    optimizer = GrassAdamW(model, lr=1e-2)
    for step in range(STEPS):
        loss_of(model, *tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, whole in enumerate((model.up, model.down)):
        joined = torch.cat([half[0][number] for half in halves])
        torch.testing.assert_close(joined, whole.detach(), rtol=1e-9, atol=1e-10)


SHARDED: list[dict[str, Any]] = [
    {"mode": mode, "selection": selection, "state_policy": policy, "dim": dim}
    for mode, selection, policy, dim in [
        ("compact", "uniform", "keep", 1),
        ("compact", "uniform", "keep", 0),
        ("compact", "multinomial_norm", "bank", 1),
        ("compact", "top_r", "reset", 0),
        ("dense", "uniform", "keep", 1),
        ("dense", "top_r", "bank", 1),
    ]
]


class Even(Experts):
    """Both weights with outputs first."""

    grass_experts: ClassVar = {"up": False, "down": False}

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(self.down.detach().transpose(1, 2).contiguous())


def made(mode: str, dim: int, *, shard: bool, **options: Any) -> tuple[Any, GrassAdamW]:
    """Experts and their optimizer; with ``shard`` under FSDP2, each weight divided along the other dimension."""
    torch.manual_seed(0)
    model: Any = Experts() if mode == "compact" else Even()
    if mode == "compact":
        grass.compact(model, rank=3, explore=2, dim=dim)
    if shard:
        fully_shard(model, shard_placement_fn=shard_placement_fn(model))
    options = {"lr": 1e-2, "update_interval": 2, **options}
    if mode == "compact":
        return model, GrassAdamW(model, **options)
    return model, GrassAdamW(grass.param_groups(model, rank=3, explore=2, dim=dim, **options))


def go_on(model: Any, optimizer: GrassAdamW, steps: range, rank: int | None) -> None:
    """Train on the tokens of all ranks (``None``) or of one, whose gradient FSDP2 averages."""
    for step in steps:
        x, expert = tokens(step)
        own = slice(None) if rank is None else slice(10 * rank, 10 * rank + 10)
        (loss_of(model, x[own], expert[own]) / (2 if rank is None else 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: Any) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)().clone() for name, value in state.items()}


def sharded(rank: int, folder: str) -> list[Any]:
    trained: list[Any] = []
    for number, case in enumerate(SHARDED):
        model, optimizer = made(**case, shard=True)
        go_on(model, optimizer, range(STEPS), rank)
        kept = get_state_dict(model, optimizer)
        dcp.save({"model": kept[0], "optimizer": kept[1]}, checkpoint_id=f"{folder}/{number}")
        go_on(model, optimizer, range(STEPS, STEPS + 4), rank)
        trained.append(values_of(model))
        trained[-1]["sizes"] = torch.tensor([p.to_local().numel() for p in model.parameters()])
    return trained


@pytest.mark.slow
def test_sharded_experts_equal_one_process(tmp_path: Path) -> None:
    """Each rank has a part of every expert's rows; one process goes on from the ranks' checkpoint."""
    ranks = run_world(sharded, 2, str(tmp_path))
    for number, case in enumerate(SHARDED):
        model, optimizer = made(**case, shard=False)
        go_on(model, optimizer, range(STEPS), None)
        loaded, restored = made(**case, shard=False)
        state = dict(zip(("model", "optimizer"), get_state_dict(loaded, restored), strict=True))
        dcp.load(state, checkpoint_id=f"{tmp_path}/{number}")
        set_state_dict(loaded, restored, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for network, own in ((model, optimizer), (loaded, restored)):
            go_on(network, own, range(STEPS, STEPS + 4), None)
            for trained in ranks:
                whole = sum(p.numel() for p in network.parameters())
                assert trained[number]["sizes"].sum() * 2 == whole
                for name, value in values_of(network).items():
                    torch.testing.assert_close(trained[number][name], value, rtol=1e-12, atol=1e-12)


def refused(rank: int, mode: str) -> str:
    model: Any = Experts()
    if mode == "compact":
        grass.compact(model, rank=3)
    fully_shard(model)
    try:
        optimizer = GrassAdamW(model if mode == "compact" else grass.param_groups(model, rank=3))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", ["compact", "dense"])
def test_experts_divided_among_ranks_are_refused(mode: str) -> None:
    """As ``fully_shard`` does without a layout; the message names one."""
    for message in run_world(refused, 2, mode):
        assert "of each expert" in message
        assert "shard_placement_fn" in message


def test_the_reduced_all_reduce_is_refused() -> None:
    from grass.distributed import ReducedAllreduceState

    _, optimizer = built("dense", "uniform")
    with pytest.raises(ValueError, match="does not take experts"):
        ReducedAllreduceState(optimizer)
