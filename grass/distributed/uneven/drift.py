"""Whether the ranks still take as long as the division was made for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grass.device import current_stream, has_streams
from grass.machine.division import Division
from grass.machine.profile import Profile
from grass.parallel.ranks import Ranks

STEPS = 50
"""So many steps are compared with the division."""
TOLERANCE = 0.1
"""A rank has left the division if the median of its times differs from the predicted one by more than this."""


class Stopwatch:
    """Seconds of this rank's forwards and backwards, without waiting for other ranks.

    Under DDP the last backward waits for the slowest rank, and a forward that sends buffers may wait too. So a backward
    is timed until the last gradient is computed, and what DDP does before a forward is not counted. On an
    accelerator the times are those of its stream, and are read in the next step. FSDP2 waits for other ranks in every
    forward: its times say nothing about one rank, so they are not taken.
    """

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=STEPS)
        self._parts: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._start: Any = None
        self._end: Any = None
        self._device: torch.device | None = None

    def watch(self, model: nn.Module) -> None:
        """Note when each gradient of a model is computed."""
        if self._device is not None:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        self._device = trained[0].device
        for p in trained:
            p.register_hook(self._computed)  # type: ignore[no-untyped-call]
        if isinstance(model, DistributedDataParallel):
            model.register_forward_pre_hook(lambda *_: self._waits.append((self._now(), None)))
            model.module.register_forward_pre_hook(lambda *_: self._waited())

    def start(self) -> None:
        """A forward begins."""
        self._start, self._end = self._now(), None

    def stop(self, *, is_computed: bool) -> None:
        """A backward has ended. ``is_computed``: its end is that of the last gradient's computation."""
        end = self._end if is_computed and self._end is not None else self._now()
        self._parts.append((self._start, end))

    def end_step(self) -> None:
        """Take the step's time, once it is over."""
        if self._parts:
            waited = sum(_between(start, end) for start, end in self._waits)
            self.seconds.append(sum(_between(start, end) for start, end in self._parts) - waited)
        self._parts, self._waits = [], []

    def _waited(self) -> None:
        if self._waits and self._waits[-1][1] is None:
            self._waits[-1] = self._waits[-1][0], self._now()

    def _computed(self, grad: Tensor) -> None:
        self._end = self._now()

    def _now(self) -> Any:
        if self._device is None or not has_streams(self._device):
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(current_stream(self._device))
        return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def drifted(division: Division, profiles: Sequence[Profile], ranks: Ranks, seconds: Sequence[float]) -> list[Profile]:
    """The profiles as the ranks' last times make them; none if all are still right. Every rank has to call this.

    Args:
        division: that the ranks follow.
        profiles: that it was made from.
        ranks: that train together.
        seconds: this rank's last steps.
    """
    every = ranks.of_each(lambda: median(seconds) if len(seconds) == STEPS else None)
    measured = [time for time in every if time is not None]
    if len(measured) < len(every):
        return []
    factors = [time / expected for time, expected in zip(measured, division.seconds, strict=True)]
    if all(abs(factor - 1) <= TOLERANCE for factor in factors):
        return []
    return [profile.scaled(factor) for profile, factor in zip(profiles, factors, strict=True)]
