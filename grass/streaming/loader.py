"""Which units are on the device: the one in use, those that come next, and as many others as a cache has room for."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from grass.offload.executor import Executor
from grass.offload.link import Link
from grass.streaming.host import HostUnit
from grass.streaming.order import BACKWARD, INFERENCE, Order, Use
from grass.streaming.visitor import Visitor

AHEAD = 2
"""Units that come before they are needed. With the one in use, three are on the device beside those in the cache."""


@dataclass
class Counts:
    """What a loader has done so far.

    Attributes:
        loads: copies of whole units.
        updates: copies of what a step has changed in a unit that was on the device.
        bytes: that were copied.
        hits: uses of a unit that was on the device already and unchanged.
        waited: seconds that the caller waited for copies.
        copying: seconds that the copies took.
    """

    loads: int = 0
    updates: int = 0
    bytes: int = 0
    hits: int = 0
    waited: float = 0.0
    copying: float = 0.0

    @property
    def hidden(self) -> float:
        """Share of the copies' time in which the caller did something else."""
        return max(0.0, 1 - self.waited / self.copying) if self.copying else 1.0


class Loader:
    """Copies units to the device before they are used.

    Args:
        units: in order.
        link: to the device.
        executor: runs the copies.
        cache: bytes of units that stay on the device, beside the one in use and the next two.

    Attributes:
        counts: what was done so far.
    """

    def __init__(self, units: list[HostUnit], link: Link, executor: Executor, cache: int) -> None:
        self._units, self._link, self._executor, self._cache = units, link, executor, cache
        self._order = Order(len(units))
        self._held: dict[int, Visitor] = {}
        self._infers = False
        self._steps = Steps()
        self.counts = Counts()

    @property
    def device(self) -> torch.device:
        """Where the units come to."""
        return self._link.device

    def use(self, number: int, kind: str, *, probe: bool) -> list[Tensor]:
        """The tensors of a unit on the device, as the host has them now. The next units begin to come.

        Args:
            number: of the unit.
            kind: of the use, as :mod:`grass.streaming.order` names it.
            probe: whether to look for weights that were changed past PyTorch's versions.
        """
        try:
            return self._use(number, kind, probe=probe)
        except BaseException:  # an interrupt may have left copies half begun
            self.clear()
            raise

    def _use(self, number: int, kind: str, *, probe: bool) -> list[Tensor]:
        use, unit = Use(number, kind), self._units[number]
        unit.check()
        if (
            kind != BACKWARD and (kind == INFERENCE) != self._infers
        ):  # evaluation may be of weights that were put there through .data
            self._infers = kind == INFERENCE
            self.clear()
        self._order.note(use)
        wanted = self._wanted(use)
        for other in self._held.keys() - {number for number, _ in wanted}:
            del self._held[other]
        self.counts.hits += number in self._held and self._is_current(number)
        for other, stepped in wanted:
            if not stepped:
                self._bring(other)
        unit.wait()
        unit.sync(probe=probe)
        self._wait(number)
        self._bring(number)  # again if something has changed it meanwhile
        self._wait(number)
        return self._held[number].tensors

    def drop(self, number: int) -> None:
        """Let go of a unit, because its values on the device are no longer those of the host."""
        self._held.pop(number, None)

    def rest(self) -> None:
        """Wait until nothing reads the host's tensors, which are about to be replaced. Let go of all units."""
        self._executor.drain()
        self.clear()
        for unit in self._units:
            unit.wait()

    def clear(self) -> None:
        """Let go of all units. Their memory is free when nothing computes with them any more."""
        self._held.clear()

    def _wanted(self, use: Use) -> list[tuple[int, bool]]:
        """The units to hold from now on, in the order of their use, and whether a step may come before."""
        wanted, room = [], self._cache
        for place, (unit, stepped) in enumerate(self._order.ahead(use)):
            if place > AHEAD:
                room -= self._units[unit].nbytes
                if room < 0:
                    break
            wanted.append((unit, stepped))
        return wanted

    def _is_current(self, number: int) -> bool:
        visitor = self._held[number]
        return not visitor.task.done or visitor.version == self._units[number].version(self._steps.count)

    def _bring(self, number: int) -> None:
        """Queue the copy of what a unit lacks on the device, unless a copy is on its way."""
        if number in self._held:
            if self._is_current(number):
                return
            self._wait(number)
        else:
            self._held[number] = Visitor(self._units[number], self._link)
        visitor = self._held[number]
        visitor.begin(self._steps, self.counts)
        self._executor.submit([visitor.task])

    def _wait(self, number: int) -> None:
        start = time.perf_counter()
        self._executor.wait(self._held[number].task)
        self.counts.waited += time.perf_counter() - start
        self._held[number].arrive()


class Steps:
    """Counts the steps of all optimizers.

    Attributes:
        count: steps so far.
    """

    def __init__(self) -> None:
        self.count = 0
        reference = weakref.ref(self)

        def stepped(*unused: object) -> None:
            if (steps := reference()) is not None:
                steps.count += 1

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove).atexit = False
