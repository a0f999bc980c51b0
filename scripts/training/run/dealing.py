"""How the processes divide the sequences of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from grass.distributed.uneven import Deal, agree, deal
from grass.machine.division import Division
from grass.parallel.ranks import Ranks
from training.data.blocks import Batches, PackedBatches
from training.run.config import TrainConfig
from training.run.processes import Processes

REPLAN_EVERY = 200
"""Steps between two looks at measured times, where no refresh says when to look."""


def divided(
    config: TrainConfig,
    train: Batches,
    processes: Processes,
    model: nn.Module,
    optimizer: Optimizer,
    work: Callable[[int], None],
) -> Deal:
    """What the configuration asks for: equal parts, sizes, or what ``work`` measures.

    Raises:
        ValueError: a stream, which has no order to deal from; sizes that do not fit the processes; steps in backward,
            which measuring would take.
    """
    if not config.deal:
        return Deal(Division((train.batch_size,) * processes.size, config.accumulate), Ranks.of(None))
    if not is_packed(train):
        raise ValueError(f"Invalid deal={config.deal}: a stream has no order to deal from")
    if tuple(config.deal) != ("auto",):
        sizes = checked(config.deal, processes.size)
        made = deal(sizes, sum(sizes) * config.accumulate)
    elif config.step_in_backward:
        raise ValueError("Invalid deal=auto: measuring would step in backward, give sizes or step_in_backward=False")
    else:
        batch = train.batch_size * processes.size * config.accumulate
        options: dict[str, Any] = {"replan_every": interval_of(optimizer), "device": processes.device}
        # a rank whose memory ends would leave the others of FSDP2 waiting: nothing larger is tried than was asked for
        largest = train.batch_size if isinstance(model, FSDPModule) else None
        made = deal(work, batch, model=model, largest=largest, **options)
    if not isinstance(model, FSDPModule):
        agree(model, optimizer)
    follow(made, train)
    return made


def checked(sizes: Sequence[int | str], processes: int) -> list[int]:
    """The sizes, if each process has a sequence in every batch.

    Raises:
        ValueError: they are others.
    """
    found = [size for size in sizes if isinstance(size, int) and size >= 1]
    if len(found) < len(sizes) or len(sizes) != processes:
        raise ValueError(
            f"Invalid deal={tuple(sizes)}: must be auto, or {processes} numbers >= 1, one for each process"
        )
    return found


def interval_of(optimizer: Optimizer) -> int:
    """Steps between two looks at the times: those between two refreshes, where there are any."""
    every = [group["update_interval"] for group in optimizer.param_groups if "update_interval" in group]
    return min(every, default=REPLAN_EVERY)


def follow(made: Deal, train: PackedBatches) -> None:
    """Let the next batches have the sizes of a division."""
    train.sizes = made.division.sizes


def weight_of(made: Deal) -> float:
    """How much the mean loss of this process's batch counts in the mean over the processes, by its sequences."""
    sizes = made.division.sizes
    return made.size * len(sizes) / sum(sizes) / made.division.micro_batches


def is_packed(train: Batches) -> TypeGuard[PackedBatches]:
    """Whether any processes can go on with these batches."""
    return isinstance(train, PackedBatches)
