"""Small models, their data and plain loops, shared by the tests of compact mode."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

import grass
from grass import PAPER, GrassAdamW, Selection, register_rule
from grass.compact_mode.layer import CompactLayer

DIMS = [0, 1]
POLICIES = ["reset", "keep", "bank"]
PLAYED: list[Iterator[Tensor]] = []
"""The last of these is what the selection rule ``playback`` takes its rows from."""

register_rule("playback", lambda norms, rank, generator, replacement: Selection(next(PLAYED[-1])))


class Network(nn.Module):
    """Three linear layers, tall, wide and without a bias, and a norm that stays plain."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(12, 20, dtype=dtype)
        self.norm = nn.LayerNorm(20, dtype=dtype)
        self.mix = nn.Linear(20, 16, dtype=dtype)
        self.down = nn.Linear(16, 8, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mix(torch.tanh(self.norm(self.up(x))))))


def batches(
    count: int, size: int = 6, dtype: torch.dtype = torch.float32, seed: int = 7
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets for :class:`Network`; inputs of uneven scale, so that norms of rows and columns differ."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [((draw(size, 12) * draw(12).exp()).to(dtype), draw(size, 8).to(dtype)) for _ in range(count)]


def loss_of(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error over a batch."""
    return (model(batch[0]) - batch[1]).square().mean()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[tuple[Tensor, Tensor]], micro: int = 1
) -> list[float]:
    """The ordinary loop, optionally over micro-batches; returns the losses of the last micro-batches."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        for part in zip(*(t.chunk(micro) for t in batch), strict=True):
            loss = loss_of(model, part) / micro
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compact_layers(model: nn.Module) -> dict[str, CompactLayer]:
    """The converted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CompactLayer)}


def selections(model: nn.Module) -> list[list[int]]:
    """The rows that each converted layer trains."""
    return [layer.selected.tolist() for layer in compact_layers(model).values()]


def converted(
    dtype: torch.dtype = torch.float32,
    rank: int | float = 3,
    dim: int = 1,
    active: torch.dtype | None = None,
    seed: int = 0,
    explore: int | float = 0,
    device: str = "cpu",
    **options: object,
) -> tuple[Network, GrassAdamW]:
    """A converted network and its optimizer, which refreshes every four steps."""
    model = Network(dtype)
    grass.compact(model, rank=rank, explore=explore, dim=dim, dtype=active, seed=seed)
    model.to(device)
    return model, GrassAdamW(model, **{**PAPER, "explore": None, "lr": 1e-2, "update_interval": 4, **options})


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Equal to the bit: ``state_dict``, active rows and selections."""
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for (name, a), b in zip(compact_layers(ours).items(), compact_layers(theirs).values(), strict=True):
        assert torch.equal(a.active, b.active), name
        assert torch.equal(a.selected, b.selected), name


def through_file(value: object) -> object:
    """What ``torch.save`` and a safe ``torch.load`` make of it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain_copy(model: nn.Module) -> nn.Module:
    """The same model without Grass."""
    model = copy.deepcopy(model)
    grass.expand(model)
    return model
