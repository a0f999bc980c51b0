"""Whether the ranks still take as long as the division was made for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grass.device import current_stream, has_streams
from grass.machine.division import Division
from grass.machine.profile import Profile
from grass.parallel.ranks import Ranks
from grass.private_names import around_waits_of_fsdp

STEPS = 50
"""So many steps are compared with the division."""
TOLERANCE = 0.1
"""A rank has left the division if the median of its times differs from the predicted one by more than this."""


class Stopwatch:
    """Seconds of this rank's forwards and backwards, without waiting for other ranks.

    Under DDP the last backward waits for the slowest rank, and a forward that sends buffers may wait too. So a backward
    is timed until the last gradient is computed, and what DDP does before a forward is not counted. On an
    accelerator the times are those of its stream, and are read in the next step. What FSDP2 does before and after each
    of its modules, where it gathers weights and reduces gradients, is not counted either.
    """

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=STEPS)
        self._parts: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._start: Any = None
        self._end: Any = None
        self._device: torch.device | None = None
        self._is_waiting = False

    def watch(self, model: nn.Module) -> None:
        """Note when each gradient of a model is computed."""
        if self._device is not None:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        self._device = trained[0].device
        for p in trained:
            p.register_hook(self._computed)  # type: ignore[no-untyped-call]
        around_waits_of_fsdp(model, self._waiting)
        if isinstance(model, DistributedDataParallel):
            model.register_forward_pre_hook(lambda *_: self._wait())
            model.module.register_forward_pre_hook(lambda *_: self._waited())

    def start(self) -> None:
        """A forward begins."""
        self._start, self._end = self._now(), None

    def stop(self, *, is_computed: bool) -> None:
        """A backward has ended. ``is_computed``: its end is that of the last gradient's computation."""
        end = self._end if is_computed and self._end is not None else self._now()
        self._parts.append((self._start, end))
        self._start = None

    def end_step(self) -> None:
        """Take the step's time, once it is over."""
        if self._parts:
            self.seconds.append(sum(_between(start, end) for start, end in self._parts) - self.waited())
        self._parts, self._waits = [], []

    def forget(self) -> None:
        """Begin anew."""
        self.seconds.clear()
        self._parts, self._waits = [], []

    def waited(self) -> float:
        """Seconds of waiting that are not counted, which begin anew."""
        waits, self._waits = self._waits, []
        return sum(_between(start, end) for start, end in waits)

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is not counted."""

        def uncounted(*arguments: Any, **keywords: Any) -> Any:
            if self._start is None or self._is_waiting:  # nobody counts, or a call within another one
                return call(*arguments, **keywords)
            self._is_waiting, start = True, self._now()
            try:
                return call(*arguments, **keywords)
            finally:
                self._waits.append((start, self._now()))
                self._is_waiting = False

        return uncounted

    def _wait(self) -> None:
        if self._start is not None:
            self._waits.append((self._now(), None))

    def _waited(self) -> None:
        if self._waits and self._waits[-1][1] is None:
            self._waits[-1] = self._waits[-1][0], self._now()

    def _computed(self, grad: Tensor) -> None:
        if self._start is not None:
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
