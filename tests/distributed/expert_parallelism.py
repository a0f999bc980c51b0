"""A mixture whose experts ranks divide, its all-to-all, and one process that draws as these ranks do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import grass
from grass.compact_mode import refresh_cycle
from grass.compact_mode.active_rows import ActiveRows
from grass.compact_mode.experts import ExpertRows
from grass.selection import draws
from grass.selection.exploration import draw_explored
from grass.selection.rules import Selection, select_rows
from grass.state import refresh

EXPERTS, INNER, OUTER, TOKENS = 4, 12, 10, 24


class Experts(nn.Module):
    """Two weights, one of them stored inputs first."""

    grass_experts: ClassVar = {"up": False, "down": True}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, INNER, OUTER) / 3) for _ in range(2))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Tokens sorted by expert, and how many each has: of the experts that are here."""
        ends = counts.cumsum(0)
        return grass.expert_linear(self, "down", grass.expert_linear(self, "up", x, ends).tanh(), ends)


class Mixture(nn.Module):
    """A layer before the experts and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.experts, self.behind = nn.Linear(OUTER, OUTER), Experts(), nn.Linear(OUTER, OUTER, bias=False)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        x, order = self.before(x), expert.argsort(stable=True)
        y = self.experts(x[order], expert.bincount(minlength=EXPERTS))
        return self.behind(x + torch.zeros_like(x).index_copy(0, order, y))


class ExpertParallel(ParallelStyle):
    """Divides the experts among the ranks, and sends each token to the rank of its expert and back."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh, self._divide, self._dispatch, self._combine)

    def _divide(self, name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))

    def _dispatch(self, module: nn.Module, inputs: Any, mesh: Any) -> tuple[Tensor, Tensor]:
        x, counts = inputs
        self.group, sent = mesh.get_group(), counts.view(mesh.size(), -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self.sizes = received.sum(1).tolist(), sent.sum(1).tolist()
        x = all_to_all_single_autograd(x, *self.sizes, self.group)
        experts = torch.arange(sent.shape[1]).repeat(mesh.size()).repeat_interleave(received.flatten())
        self.order = experts.argsort(stable=True)
        return x[self.order], received.sum(0)

    def _combine(self, module: nn.Module, y: Tensor, mesh: Any) -> Tensor:
        y = torch.zeros_like(y).index_copy(0, self.order, y)
        return all_to_all_single_autograd(y, *reversed(self.sizes), self.group)


def mixture(mesh: Any = None) -> Mixture:
    """In one process, or with its experts divided over a mesh."""
    torch.manual_seed(0)
    model = Mixture().double()
    return model if mesh is None else parallelize_module(model, mesh, {"experts": ExpertParallel()})


def tokens(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and targets of all ranks, and experts: in some steps one has no tokens, or two of one rank have none."""
    generator = torch.Generator().manual_seed(step)
    expert = torch.randint(EXPERTS, (TOKENS,), generator=generator)
    expert[: TOKENS // 2][expert[: TOKENS // 2] == 0] = 1  # the first ranks have none for the first expert
    if step % 3 == 1:
        expert %= 2
    elif step % 3 == 2:
        expert[expert == 1] = 3
    x, y = torch.randn(2, TOKENS, OUTER, generator=generator, dtype=torch.float64)
    return x, y, expert


def loss_of(model: nn.Module, step: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """The mean over the tokens of a rank."""
    x, y, expert = (part.chunk(ranks)[rank] for part in tokens(step))
    loss: Tensor = (model(x, expert) - y).square().mean()
    return loss


def average(model: Any) -> None:
    """Gradients of experts are sums over the ranks, each of whose losses is a mean; those of others are one rank's.

    FSDP2 has averaged those of others, and divided those of experts by ``set_gradient_divide_factor``.
    """
    experts, ranks = {id(p) for p in model.experts.parameters()}, dist.get_world_size()
    for p in (p for p in model.parameters() if p.grad is not None):
        if isinstance(model.experts if id(p) in experts else model, FSDPModule):
            continue
        if id(p) not in experts:
            dist.all_reduce(p.grad)
        p.grad /= ranks


def clip(model: Any, limit: float) -> Tensor:
    """Clip by the norm of all gradients, of which torch takes together those that lie on one mesh."""
    parts: dict[Any, list[nn.Parameter]] = {}
    for p in (p for p in model.parameters() if p.grad is not None):
        parts.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = [whole(nn.utils.get_total_norm([p.grad for p in part])) for part in parts.values()]
    norm = torch.stack(norms).square().sum().sqrt()
    for part in parts.values():
        nn.utils.clip_grads_with_norm_(part, limit, norm)
    return norm


def train(model: Any, optimizer: Any, steps: range, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    """The loop of a user on one rank or in one process; returns the norms that were clipped."""
    norms = []
    for step in steps:
        loss_of(model, step, rank, ranks).backward()
        if ranks > 1:
            average(model)
        norms.append(clip(model, 0.2))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


@contextmanager
def drawing_as_ranks(ranks: int) -> Iterator[None]:
    """Let all experts of a layer in this process draw rows as those of each rank do."""
    own = EXPERTS // ranks

    def key(place: int, rank: int) -> int:
        return place + (rank * own << 24)

    def of_each(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda seed, place, number: lambda rank: make(seed, key(place, rank), number)

    def selected(norms: Tensor, count: int, rule: str, generator: Any, *, experts: int = 1, **more: Any) -> Selection:
        if experts == 1:
            return select_rows(norms, count, rule, generator(0), **more)
        parts = [
            select_rows(part, count // ranks, rule, generator(rank), experts=own, **more).indices + rank * len(part)
            for rank, part in enumerate(norms.chunk(ranks))
        ]
        return Selection(torch.cat(parts))

    def explored(rows: Tensor, size: int, count: int, seed: int, place: int, step: int, experts: int = 1) -> Tensor:
        if experts == 1:
            return draw_explored(rows, size, count, seed, place, step)
        part = size // ranks
        return torch.cat(
            [
                draw_explored(each - rank * part, part, count // ranks, seed, key(place, rank), step, own) + rank * part
                for rank, each in enumerate(rows.chunk(ranks))
            ]
        )

    def explored_of_each(rows: Any, size: int, count: int, keys: Any, experts: int = 1) -> list[Tensor]:
        return [explored(own, size, count, *key, experts) for own, key in zip(rows, keys, strict=True)]

    def first(layer: Any) -> Tensor:
        (seed, place), size = layer.first_draw, layer.shape[layer.dim] // ranks
        counts = [count // ranks for count in layer.counts()]
        drawn = []
        for rank in range(ranks):
            stratum = SimpleNamespace(
                shape=(size,), dim=0, experts=own, first_draw=(seed, key(place, rank)), first_rows=None
            )
            stratum.counts = lambda: counts
            drawn.append((ActiveRows.draw_first(stratum) + rank * size).split(counts))  # type: ignore[arg-type]
        return torch.cat([part for parts in zip(*drawn, strict=True) for part in parts])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refresh, "selection_generator", of_each(draws.selection_generator))
        patch.setattr(refresh, "cycle_generator", of_each(draws.cycle_generator))
        patch.setattr(refresh, "select_rows", selected)
        patch.setattr(refresh_cycle, "draw_explored", explored)
        patch.setattr(refresh_cycle, "draw_explored_of_each", explored_of_each)
        patch.setattr(ExpertRows, "draw_first", first)
        yield
