"""Batches of uneven sizes: step ``k`` takes the same samples of the data, whatever ranks share them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np
from torch.utils.data import Sampler

from grass.machine.division import Division


class UnevenBatches(Sampler[list[int]]):
    """A batch sampler for a ``DataLoader``: lists of indices, one for each micro-batch.

    The samples of step ``k`` are places ``k * batch ...`` of an order that follows from ``seed`` and the epoch. Which
    ranks there are only decides who takes which of them. So a run that was saved on one set of ranks goes on with the
    same samples on another one: pass ``start=k``.

    An iteration ends with the epoch, and the next one begins the next epoch.

    Args:
        length: of the data.
        division: how many samples each rank takes of each micro-batch.
        rank: whose micro-batches these are; ``None``: of all ranks in turn, as accelerate and Trainer want them.
        seed: of the order.
        shuffle: ``False`` keeps the data's own order.
        drop_last: ``False`` also deals the samples at the end of an epoch that do not fill a batch. A rank that gets
            none of them takes a sample of another one; :meth:`is_idle` says so, and its loss must not count.
        start: steps that have been done.

    Attributes:
        step: with which the next iteration begins.
        begun: steps of which a list has been taken; a loader may be ahead of training.

    Raises:
        ValueError: the data do not fill one batch, or a number is out of range.
    """

    def __init__(
        self,
        length: int,
        division: Division,
        rank: int | None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        start: int = 0,
    ) -> None:
        for name, value in {"seed": seed, "start": start}.items():
            if value < 0:
                raise ValueError(f"Invalid {name}={value}. Must be >= 0.")
        if length < division.batch and (drop_last or length < 1):
            raise ValueError(f"{length} samples do not fill one batch of {division.batch}")
        if rank is None and not (drop_last and min(division.sizes)):
            raise ValueError(
                "accelerate needs a sample of every micro-batch on every rank: drop_last=True and sizes > 0, got "
                f"{drop_last=} and sizes {division.sizes}"
            )
        self.length, self.division, self.rank = length, division, rank
        self.seed, self.shuffle, self.drop_last, self.step = seed, shuffle, drop_last, start
        self.begun = start
        self._later: dict[int, Division] = {}

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.length // self.division.batch if self.drop_last else -(-self.length // self.division.batch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with an epoch, as accelerate and Lightning do."""
        self.step = epoch * self.steps

    def change(self, division: Division, step: int) -> None:
        """Divide the batches otherwise from a step on, of which no list has been taken on any rank.

        Raises:
            ValueError: it has as many lists or samples no longer, or lists of the step have been taken.
        """
        same = (self.division.batch, self.division.micro_batches, len(self.division.sizes))
        if (division.batch, division.micro_batches, len(division.sizes)) != same or step < self.begun:
            raise ValueError(f"Cannot go from {self.division} to {division} in step {step} after {self.begun} steps")
        self._later[step] = division

    def __len__(self) -> int:
        """Lists of the next iteration."""
        lists = self.division.micro_batches * (len(self.division.sizes) if self.rank is None else 1)
        return (self.steps - self.step % self.steps) * lists

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the epoch."""
        (epoch, first), steps = divmod(self.step, self.steps), self.steps
        self.step = (epoch + 1) * steps
        order = self.order(epoch)
        for step in range(first, steps):
            self.begun = epoch * steps + step + 1
            self.division = self._later.pop(self.begun - 1, self.division)
            samples = order[step * self.division.batch : (step + 1) * self.division.batch]
            for start, end in self._bounds(len(samples)):
                yield samples[start:end] if end > start else samples[:1]

    def order(self, epoch: int) -> list[int]:
        """The places of an epoch."""
        if not self.shuffle:
            return list(range(self.length))
        order: list[int] = np.random.default_rng((self.seed, epoch)).permutation(self.length).tolist()
        return order

    def is_idle(self, step: int, micro_batch: int) -> bool:
        """Whether this rank has no sample of its own in a micro-batch of a step."""
        left = self.length - step % self.steps * self.division.batch
        start, end = self._bounds(min(left, self.division.batch))[micro_batch]
        return start == end

    def _bounds(self, samples: int) -> list[tuple[int, int]]:
        """From where to where each list goes among the samples of a step. Fewer than a batch go in proportion."""
        sizes, batch = self.division.sizes, self.division.batch
        ends = [end * samples // batch for end in accumulate(sizes * self.division.micro_batches, initial=0)]
        every = list(pairwise(ends))
        return every if self.rank is None else every[self.rank :: len(sizes)]
