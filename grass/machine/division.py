"""How a batch is divided among ranks of unlike speed and memory, so that the slowest of them is done earliest.

After Cephalo (Guo et al., 2024, https://arxiv.org/abs/2411.01075), which divides computation and state unevenly. Here
only computation is divided. All ranks have the same number ``a`` of micro-batches, rank ``i`` has ``m_i`` samples in
each, and a batch is ``a sum_i m_i`` samples. With ``t_i(m)`` seconds for a micro-batch of ``m`` samples, the division
minimises ``max_i a t_i(m_i)`` under ``m_i <= largest_i``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grass.machine.profile import Profile


@dataclass(frozen=True)
class Division:
    """How a batch is divided.

    Attributes:
        sizes: samples in a micro-batch of each rank.
        micro_batches: of a step, the same number on all ranks.
        seconds: predicted for the forwards and backwards of a step, of each rank; empty if nothing was measured.
    """

    sizes: tuple[int, ...]
    micro_batches: int
    seconds: tuple[float, ...] = ()

    @property
    def batch(self) -> int:
        """Samples of a step, of all ranks."""
        return self.micro_batches * sum(self.sizes)

    @property
    def step(self) -> float:
        """Predicted seconds of the slowest rank."""
        return max(self.seconds)

    def __str__(self) -> str:
        text = f"{self.batch} samples: {self.micro_batches} micro-batches of {', '.join(map(str, self.sizes))}"
        every = ", ".join(f"{seconds:.3g}" for seconds in self.seconds)
        return f"{text}; predicted seconds {every}" if every else text


def divide(profiles: Sequence[Profile], batch: int, micro_batches: int | None = None) -> Division:
    """The division of ``batch`` samples with the least predicted time; of equal ones that with fewer micro-batches.

    Every rank gets at least one sample in each micro-batch.

    Args:
        profiles: of each rank.
        batch: samples of a step.
        micro_batches: their number, a divisor of ``batch``; ``None``: any.

    Raises:
        ValueError: the batch is smaller than the number of ranks, nothing fits on a rank, or no number of micro-batches
            makes the batch fit.
    """
    check_batch(batch, len(profiles))
    largest = [profile.largest for profile in profiles]
    if 0 in largest:
        raise ValueError(f"Not one sample fits on rank {largest.index(0)} (largest micro-batches: {largest})")
    found: Division | None = None
    for count in _counts(batch, len(profiles)) if micro_batches is None else (micro_batches,):
        if batch // count > sum(largest):
            continue
        sizes = fill([profile.predict for profile in profiles], largest, batch // count)
        other = predicted(profiles, sizes, count)
        if found is None or other.step < found.step * (1 - 1e-9):
            found = other
    if found is None:
        raise ValueError(
            f"Cannot divide batch={batch} among {len(profiles)} ranks whose largest micro-batches are {largest}: "
            f"a batch is a number of micro-batches times {len(profiles)} to {sum(largest)} samples"
        )
    return found


def divide_evenly(profiles: Sequence[Profile], batch: int) -> Division | None:
    """The division into equal parts with the least predicted time; ``None`` if there is none that fits."""
    ranks, most = len(profiles), min(profile.largest for profile in profiles)
    every = [count for count in _counts(batch, ranks) if batch % (count * ranks) == 0]
    found = [
        predicted(profiles, [batch // (count * ranks)] * ranks, count)
        for count in every
        if batch // (count * ranks) <= most
    ]
    return min(found, key=lambda division: division.step, default=None)


def predicted(profiles: Sequence[Profile], sizes: Sequence[int], micro_batches: int) -> Division:
    """A division with its predicted seconds."""
    seconds = [micro_batches * profile.predict(m) for profile, m in zip(profiles, sizes, strict=True)]
    return Division(tuple(sizes), micro_batches, tuple(seconds))


def fill(seconds: Sequence[Callable[[int], float]], most: Sequence[int], total: int) -> list[int]:
    """The sizes ``1 <= m_i <= most_i`` of sum ``total`` with the least ``max_i seconds_i(m_i)``.

    One sample after the other goes to the rank that would be done first with it. This is optimal if no ``seconds_i``
    falls: when the greedy gives a rank its last sample at time ``T``, all other ranks that are not full would be done
    at ``T`` or later with one sample more, so any sizes with a smaller maximum have a smaller sum.

    Raises:
        ValueError: ``total`` is less than the number of ranks or more than the sum of ``most``.
    """
    if not len(seconds) <= total <= sum(most):
        raise ValueError(f"Invalid {total=}. Must be in {len(seconds)} ... {sum(most)}.")
    sizes = [1] * len(seconds)
    heap = [(seconds[i](2), i) for i in range(len(sizes)) if most[i] > 1]
    heapq.heapify(heap)
    for _ in range(total - len(sizes)):
        _, i = heapq.heappop(heap)
        sizes[i] += 1
        if sizes[i] < most[i]:
            heapq.heappush(heap, (seconds[i](sizes[i] + 1), i))
    return sizes


def check_batch(batch: object, ranks: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` if a batch is no number of samples, or smaller than the number of ranks."""
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"Invalid {batch=}: must be a number of samples")
    if batch < ranks:
        raise ValueError(f"Invalid {batch=}: must be at least the number of ranks, {ranks}")


def _counts(batch: int, ranks: int) -> list[int]:
    """The numbers of micro-batches that divide a batch and leave each rank one sample in each."""
    return [count for count in range(1, batch // ranks + 1) if batch % count == 0]
