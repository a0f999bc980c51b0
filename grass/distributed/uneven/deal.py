"""One batch on unlike GPUs: each rank gets as many samples as its speed and memory allow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from grass.device import accelerator
from grass.distributed.uneven.drift import Stopwatch, drifted
from grass.distributed.uneven.gradients import communicating, synchronised
from grass.distributed.uneven.measuring import Work, measure
from grass.distributed.uneven.sampler import UnevenBatches
from grass.labels import IGNORED, next_tokens
from grass.machine.division import Division, check_batch, divide, divide_evenly
from grass.machine.profile import Profile
from grass.machine.rates import machine_name
from grass.parallel.ranks import Ranks

logger = logging.getLogger("grass")

T = TypeVar("T")


class Deal:
    """How a batch is divided among the ranks, and what a training loop needs for it. :func:`deal` makes one.

    Attributes:
        division: sizes, number of micro-batches, and predicted seconds of each rank.
        ranks: that share the batch.
        rank: of this process among them.
        profiles: what was measured on each rank; empty if the user has chosen the sizes.
        replan_every: steps between two looks at whether the division is still right; 0 never looks.
    """

    def __init__(
        self,
        division: Division,
        ranks: Ranks,
        profiles: Sequence[Profile] = (),
        replan_every: int = 0,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.division, self.ranks = division, ranks
        self.rank = ranks.rank
        self.profiles, self.replan_every = list(profiles), replan_every
        self._stopwatch = (stopwatch or Stopwatch()) if profiles and replan_every else None

    @property
    def size(self) -> int:
        """Samples of this rank in a micro-batch."""
        return self.division.sizes[self.rank]

    def batches(self, length: int, *, all_ranks: bool = False, **options: Any) -> UnevenBatches:
        """The batch sampler for data of so many samples; the same order on all ranks, which all have to call this.

        Args:
            length: of the data.
            all_ranks: for a loader that accelerate prepares, which gives list ``i`` to rank ``i % ranks``.
            options: ``seed``, ``shuffle``, ``drop_last`` and ``start`` of :class:`UnevenBatches`.

        Raises:
            ValueError: on every rank, if they differ in an argument: they would take parts of different orders.
        """
        sampler = UnevenBatches(length, self.division, None if all_ranks else self.rank, **options)
        self.ranks.verify_settings({"the length of the data": length, **options})
        return sampler

    def rounds(self, loader: DataLoader[Any]) -> Iterator[list[Any]]:
        """This rank's micro-batches, a list for each step; the steps of one epoch.

        Where this rank has no sample of its own, it computes another rank's with all labels ignored. With
        ``replan_every``, other sizes may follow after a step; what workers have loaded ahead is then loaded again.

        Raises:
            ValueError: the loader's ``batch_sampler`` is not one of :meth:`batches`.
            TypeError: this rank has no sample, and the batch is no ``dict`` with ``labels`` that could be ignored.
        """
        sampler = loader.batch_sampler
        if not isinstance(sampler, UnevenBatches) or sampler.rank != self.rank:
            raise ValueError("Invalid loader: must be DataLoader(data, batch_sampler=deal.batches(len(data)))")
        step = sampler.step
        end = step - step % sampler.steps + sampler.steps
        while step < end:
            for found in self._lists(loader, sampler, step):
                yield found
                step += 1
                if self.end_step(step):
                    sampler.division, sampler.step = self.division, step
                    break

    def _lists(self, loader: DataLoader[Any], sampler: UnevenBatches, step: int) -> Iterator[list[Any]]:
        """The micro-batches of each step from ``step`` to the end of the epoch."""
        found: list[Any] = []
        for batch in loader:
            found.append(ignored(batch) if sampler.is_idle(step, len(found)) else batch)
            if len(found) == self.division.micro_batches:
                yield found
                step, found = step + 1, []

    def end_step(self, step: int, *, keep_micro_batches: bool = False) -> bool:
        """Whether another division follows after ``step`` steps, because the ranks' times have changed.

        :meth:`rounds` calls it. Loops with other loaders call it themselves, on every rank, after each step.

        Args:
            step: steps done.
            keep_micro_batches: change the sizes alone.
        """
        if self._stopwatch is None:
            return False
        self._stopwatch.end_step()
        if step % self.replan_every:
            return False
        profiles = drifted(self.division, self.profiles, self.ranks, self._stopwatch.seconds)
        if not profiles:
            return False
        before, self.profiles = self.division, profiles
        self.division = divide(profiles, before.batch, before.micro_batches if keep_micro_batches else None)
        self._stopwatch.forget()
        logger.info("Grass: after step %d the ranks' times have changed: %s; before: %s", step, self.division, before)
        return True

    def items(self, rounds: Sequence[Any], count: Callable[[Any], int] | None = None) -> Tensor:
        """What a sum of losses is to be divided by: tokens of the whole batch over the number of ranks.

        DDP and FSDP2 take the mean of the ranks' gradients. With ``num_items_in_batch=items``, it is the gradient of
        the mean loss over the tokens of all ranks. Every rank has to call this.

        Args:
            rounds: this rank's micro-batches of one step.
            count: of the targets in a micro-batch; ``None``: the labels that are not -100, in a ``dict`` with
                ``labels``, each of which is the target of the token before it, or ``shift_labels``.

        Raises:
            ValueError: on every rank, if one of them cannot count, or nothing is to be predicted.
        """
        total = torch.zeros(2, dtype=torch.int64, device=communicating(self.ranks))
        error: Exception | None = None
        try:
            total[0] = sum((count or targets)(batch) for batch in rounds)
        except Exception as raised:
            error, total[1] = raised, 1
        if self.ranks.group is not None:
            dist.all_reduce(total, group=self.ranks.group)
        items, failed = total.tolist()
        if failed:
            raise ValueError(f"{failed} ranks cannot count what their batches predict: {error or 'not this one'}")
        if not items:
            raise ValueError("No rank has a token to predict in this batch: all labels are -100")
        return total[0].double() / len(self.division.sizes)

    @contextmanager
    def synced(self, model: nn.Module, k: int | None = None) -> Iterator[None]:
        """The context of the forward and backward of micro-batch ``k``; of the last one, or of all, without ``k``.

        After the last one, gradients are the mean over the ranks: by DDP or FSDP2, whichever the model is wrapped in,
        or by one all-reduce after backward. The latter is for models that some of the ranks stream
        (:func:`grass.stream`), which DDP does not take.
        """
        is_last = k is None or k + 1 == self.division.micro_batches
        with synchronised(model, self.ranks, is_last), self.timed(model, is_last=is_last):
            yield

    @contextmanager
    def timed(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """A forward and backward that somebody else synchronises: times it, for :meth:`end_step`.

        Args:
            model: as it is called, in DDP or FSDP2.
            is_last: whether its gradients are exchanged, in the last micro-batch of a step.
        """
        watch = self._stopwatch
        if watch is not None:
            watch.watch(model)
            watch.start()
        yield
        if watch is not None:
            watch.stop(is_computed=is_last and isinstance(model, DistributedDataParallel))

    def __repr__(self) -> str:
        return str(self.division)


def deal(
    work: Work | Sequence[int],
    batch: int,
    *,
    largest: int | None = None,
    profile: str | Path | None = None,
    replan_every: int = 0,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Deal:
    """Divide a batch among the ranks so that the slowest is done earliest. Every rank has to call this.

    ::

        def work(size):  # forward and backward of some samples on this rank, without a step
            with ddp.no_sync():
                ddp(**collate(data[:size])).loss.backward()
            optimizer.zero_grad()

        deal = grass.distributed.deal(work, batch=64)

    Args:
        work: runs forward and backward of so many samples on this rank, of the model as it trains: resident, in int8,
            or streamed. Instead, samples of each rank in a micro-batch, if they are known: ``[11, 5]``; a rank with 0
            computes a sample whose labels are ignored.
        batch: samples of a step, of all ranks; the same on all.
        largest: the most samples of a micro-batch of this rank; ``None``: as many as fit. FSDP2 needs it where memory
            could be exceeded, because a rank that runs out of memory leaves others waiting in a collective.
        profile: a file of this rank. Times are read from it if every rank has one, and else written to it, with the
            machine's rates, so that ``python -m grass.memory --machine`` plans with it on any other machine.
        replan_every: look after every so many steps whether a rank's last 50 steps took more than 10% longer or shorter
            than predicted, and divide anew if so. Give it ``update_interval``, so that sizes change with selections.
        model: that ``work`` runs; needed under FSDP2, so that waiting for other ranks is not counted.
        device: that computes; ``None``: this machine's accelerator, or the CPU.
        group: the ranks; ``None``: all.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: on every rank: sizes that do not fit the ranks or the batch, or that differ between ranks; a batch
            smaller than the number of ranks, or that no memory can hold; a profile of other hardware.
    """
    ranks = Ranks.of(group)
    size = 1 if ranks.group is None else ranks.group.size()
    if not callable(work):
        division = same(ranks, "sizes", lambda: given(work, batch, size))
        return Deal(division, ranks)
    same(ranks, "batch and replan_every", lambda: checked(batch, replan_every, largest, size))
    place = torch.empty(0, device=device or accelerator()).device
    profiles = ranks.of_each(lambda: None if profile is None else stored(Path(profile), place))
    watch = Stopwatch()
    if model is not None:
        watch.watch(model)
    if None in profiles:
        most = batch - size + 1
        own = measure(
            work, most if largest is None else min(largest, most), ranks, place, watch, with_rates=profile is not None
        )
        if profile is not None:
            own.save(profile)
        profiles = list(ranks.of_each(lambda: own))
    found = [one for one in profiles if one is not None]
    division, evenly = divide(found, batch), divide_evenly(found, batch)
    logger.info("Grass: %s; evenly: %s", division, "not possible" if evenly is None else evenly)
    return Deal(division, ranks, found, replan_every, watch)


def checked(batch: int, replan_every: int, largest: int | None, ranks: int) -> tuple[int, int]:
    """The two numbers that all ranks share, checked."""
    check_batch(batch, ranks)
    if replan_every < 0:
        raise ValueError(f"Invalid {replan_every=}: must be >= 0")
    if largest is not None and largest < 1:
        raise ValueError(f"Invalid {largest=}: must be >= 1")
    return batch, replan_every


def same(ranks: Ranks, name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns, if it is the same on all ranks."""
    every = ranks.of_each(make)
    if any(one != every[0] for one in every):
        values = "; ".join(f"{value} on rank {rank}" for rank, value in enumerate(every))
        raise ValueError(f"The ranks differ in {name}: {values}")
    return every[0]


def stored(path: Path, device: torch.device) -> Profile | None:
    """The profile in a file, if there is one, of this hardware."""
    if not path.exists():
        return None
    found, here = Profile.read(path), machine_name(device)
    if found.machine != here:
        raise ValueError(f"{path} holds times of {found.machine!r}, this is {here!r}: measure again without the file")
    return found


def given(sizes: Sequence[int], batch: int, ranks: int) -> Division:
    """The division with sizes that the user has chosen."""
    check_batch(batch, ranks)
    if not isinstance(sizes, Sequence):
        raise TypeError(f"Invalid work={sizes!r}: must be a function of a number of samples, or a size for each rank")
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise TypeError(f"Invalid {sizes=}: must be numbers of samples")
    if len(sizes) != ranks or min(sizes) < 0 or not sum(sizes):
        raise ValueError(f"Invalid {sizes=}: must be {ranks} numbers >= 0, one for each rank, and not all 0")
    if batch % sum(sizes):
        raise ValueError(f"Invalid {batch=}: must be a multiple of the {sum(sizes)} samples of {sizes=}")
    return Division(tuple(sizes), batch // sum(sizes))


def targets(batch: Any) -> int:
    """Targets in a batch of a language model."""
    if not hasattr(batch, "keys") or not {"labels", "shift_labels"} & set(batch.keys()):
        raise TypeError(f"a {type(batch).__name__} has no labels: pass count=")
    labels = batch["shift_labels"] if "shift_labels" in batch else next_tokens(batch["labels"])
    return int((labels != IGNORED).sum())


def ignored(batch: Any) -> dict[str, Any]:
    """A batch whose loss is zero: all labels are ignored."""
    if not hasattr(batch, "keys") or "labels" not in batch:
        raise TypeError(
            f"This rank has no sample in a micro-batch, and a {type(batch).__name__} has no labels to ignore: give it "
            "a sample, or use drop_last=True"
        )
    names = {"labels", "shift_labels"} & set(batch.keys())
    return {**batch, **{name: torch.full_like(batch[name], IGNORED) for name in names}}
