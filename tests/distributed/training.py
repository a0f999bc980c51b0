"""What the distributed tests train: :class:`tests.compact_mode.networks.Network`, jointly and in one process."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grass import PAPER, GrassAdamW, param_groups
from tests.compact_mode.networks import Network, batches, loss_of

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}
"""In float64 a sum over ranks differs from one process's by its order alone; Adam's division magnifies that."""

STEPS = 9
OPTIONS = {**PAPER, "lr": 1e-2, "update_interval": 4}
"""Nine steps hold three selections: chosen in steps 1, 5 and 9 in dense mode, after 4 and 8 in compact mode."""


def joint_batches(steps: int = STEPS, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Batches of 24, which divide by two, three, four ranks and by two micro-batches of those."""
    return batches(steps, size=24, dtype=dtype)


def share(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return batch[0].chunk(size)[rank], batch[1].chunk(size)[rank]


def dense(
    dtype: torch.dtype = torch.float64, rank: int | float = 3, device: str = "cpu", **options: Any
) -> tuple[Network, GrassAdamW]:
    """A network and its optimizer in dense mode."""
    model = Network(dtype).to(device)
    return model, GrassAdamW(param_groups(model, rank), **{**OPTIONS, **options})


def train_jointly(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[tuple[Tensor, Tensor]], micro: int = 1
) -> None:
    """The ordinary loop on this rank's share, with ``no_sync`` for all micro-batches but the last."""
    for batch in data:
        optimizer.zero_grad()
        parts = list(zip(*(t.chunk(micro) for t in share(batch)), strict=True))
        for i, part in enumerate(parts):
            waits = i + 1 < micro and isinstance(ddp, DistributedDataParallel)
            with ddp.no_sync() if waits else nullcontext():
                (loss_of(ddp, part) / micro).backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Its ``state_dict``, detached from the model."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], **tolerance: float) -> None:
    """Equal up to the order of summation."""
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, **(tolerance or TOLERANCE), msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_trained_alike(
    ours: list[tuple[dict[str, Tensor], list[list[int]]]], theirs: list[tuple[dict[str, Tensor], list[list[int]]]]
) -> None:
    """The same rows chosen, and weights equal up to the order of summation."""
    for (weights, rows), (expected, expected_rows) in zip(ours, theirs, strict=True):
        assert rows == expected_rows
        assert_close(weights, expected)
