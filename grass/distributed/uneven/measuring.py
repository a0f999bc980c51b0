"""Times of micro-batches of 1, 2, 4, ... samples, measured on all ranks at the same time, as they train."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from grass.device import has_streams, synchronize
from grass.distributed.uneven.drift import Stopwatch
from grass.distributed.uneven.gradients import communicating
from grass.machine.profile import Profile, between, doubled
from grass.machine.rates import Machine, machine_name
from grass.parallel.ranks import Ranks

REPEATS = 3
"""Timed runs of each size, after one that warms up; the median counts."""

Work = Callable[[int], object]
"""``work(m)`` runs forward and backward of ``m`` samples on this rank."""


def measure(
    work: Work,
    most: int,
    ranks: Ranks,
    device: torch.device,
    watch: Stopwatch | None = None,
    *,
    with_rates: bool = False,
) -> Profile:
    """Measure this rank while all others measure themselves. Every rank has to call this.

    All ranks begin each run together, and a rank that is done repeats its largest size until all are. So they share
    links, memory and heat as they do in training. Random states are restored.

    Args:
        work: an error that says that memory is not enough is an answer.
        most: the largest size to try.
        ranks: that measure together.
        device: whose work is waited for.
        watch: of the model that ``work`` runs, so that what FSDP2 waits for other ranks is not counted.
        with_rates: also of updates and of the link to host memory, which takes a second or two.

    Raises:
        ValueError: on every rank, if ``work`` raised one on some of them.
        RuntimeError: likewise, for any other error.
    """
    search, watch = Search(most), watch or Stopwatch()
    with torch.random.fork_rng([device] if has_streams(device) else [], device_type=_type_with_rng(device)):
        while ranks.any((size := search.next()) is not None, communicating(ranks)):
            seconds, error = _timed(work, size or search.largest, ranks, device, watch)
            ranks.of_each(partial(_raise, error))
            if size is not None:
                search.note(size, seconds)
    rates = ranks.of_each(lambda: Machine.measure(device))[ranks.rank] if with_rates else None
    return Profile(machine_name(device), search.seconds, search.largest, rates)


@dataclass
class Search:
    """The sizes that a rank tries: doubled while they fit, then between the largest that fits and the first that fails.

    Attributes:
        most: no larger size is tried.
        seconds: of the sizes that fit.
        fails: the smallest size that does not fit.
    """

    most: int
    seconds: dict[int, float] = field(default_factory=dict)
    fails: int | None = None

    @property
    def largest(self) -> int:
        """The largest size that fits; 0 if none does."""
        return max(self.seconds, default=0)

    def next(self) -> int | None:
        """The next size to try; ``None`` if all is known."""
        if self.fails is not None:
            return between(self.largest, self.fails)
        return next((size for size in doubled(self.most) if size not in self.seconds), None)

    def note(self, size: int, seconds: float | None) -> None:
        """Take note of a result; ``None``: out of memory."""
        if seconds is None:
            self.fails = size
        else:
            self.seconds[size] = seconds


def _timed(
    work: Work, size: int, ranks: Ranks, device: torch.device, watch: Stopwatch
) -> tuple[float | None, Exception | None]:
    """The median time, ``None`` if memory was not enough; and any other error, after which no other rank waits."""
    times: list[float] = []
    failed, error = size == 0, None
    for _ in range(1 + REPEATS):
        ranks.any(False, communicating(ranks))  # all begin together
        start = time.perf_counter()
        watch.start()
        if not failed:
            try:
                work(size)
                synchronize(device)
            except Exception as raised:
                failed, error = True, None if is_out_of_memory(raised) else raised
            if failed:  # here, where the error no longer keeps what it was raised in
                _free(device)
        times.append(time.perf_counter() - start - watch.waited())
    watch.stop(is_computed=False)
    watch.forget()
    return None if failed else median(times[1:]), error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no more memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "not enough memory" in str(error)


def _free(device: torch.device) -> None:
    gc.collect()
    if has_streams(device):
        torch.accelerator.empty_cache()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _type_with_rng(device: torch.device) -> str:
    """The type of device whose random state is kept; any will do without devices."""
    return device.type if has_streams(device) else "cuda"
