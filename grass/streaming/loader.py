"""Which units are on the device: the one in use, those that come next, and as many others as a cache has room for."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from grass.offload.executor import Executor
from grass.offload.link import Link
from grass.offload.tasks import Task
from grass.streaming.host import HostUnit, outgoing
from grass.streaming.order import Order, Use

AHEAD = 2
"""Units that come before they are needed. With the one in use, three are on the device beside those in the cache."""


@dataclass(eq=False)
class Load:
    """A unit's tensors on the device.

    Attributes:
        tensors: in the order of the unit's places.
        nbytes: bytes that travel.
        task: the copy.
        stamps: of the host's tensors when the copy began, and how often optimizers had stepped: a fused optimizer
            does not count its changes in the versions of tensors.
    """

    tensors: list[Tensor]
    nbytes: int
    task: Task = field(init=False)
    stamps: tuple[int, list[tuple[int, int]]] | None = None


@dataclass
class Counts:
    """What a loader has done so far.

    Attributes:
        loads: units that were copied.
        bytes: that were copied.
        hits: uses of a unit that was on the device already and unchanged.
        stale: copies that were not used, because the host's values changed.
        waited: seconds that the caller waited for copies.
        copying: seconds that the copies took.
    """

    loads: int = 0
    bytes: int = 0
    hits: int = 0
    stale: int = 0
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
        self._held: dict[int, Load] = {}
        self._bytes = [unit.nbytes for unit in units]
        self._steps = _Steps()
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
        use, unit = Use(number, kind), self._units[number]
        self._order.note(use)
        wanted = self._wanted(use)
        for other in list(self._held):
            if other not in dict(wanted) or self._is_stale(other):
                del self._held[other]
        was_held = number in self._held
        if not was_held:
            self._begin(number)
        for other, stepped in wanted[1 : AHEAD + 1]:
            if other not in self._held and not stepped:
                self._begin(other)
        unit.wait()
        unit.sync(probe=probe)
        self._wait(number)
        if self._is_stale(number):
            self._begin(number)
            self._wait(number)
        elif was_held:
            self.counts.hits += 1
        return self._held[number].tensors

    def clear(self) -> None:
        """Let go of all units. Their memory is free when nothing computes with them any more."""
        self._held.clear()

    def _wanted(self, use: Use) -> list[tuple[int, bool]]:
        """The units to hold from now on, in the order of their use, and whether a step may come before."""
        wanted, room = [], self._cache
        for place, (unit, stepped) in enumerate(self._order.ahead(use)):
            if place > AHEAD:
                room -= self._bytes[unit]
                if room < 0:
                    break
            wanted.append((unit, stepped))
        return wanted

    def _begin(self, number: int) -> None:
        """Queue the copy of a unit."""
        self._held.pop(number, None)
        unit = self._units[number]
        load = self._held[number] = Load(unit.room_on(self._link.device), self._bytes[number])
        mark = self._link.mark()

        def work() -> None:
            unit.wait()
            load.stamps = self._steps.count, unit.stamps()
            start = time.perf_counter()
            for place, there in zip(unit.places, load.tensors, strict=True):
                self._link.up(outgoing(place.get()), there, mark)
            self.counts.copying += time.perf_counter() - start

        load.task = Task(unit.name, "up", load.nbytes, work=work)
        self._executor.submit([load.task])
        self.counts.loads += 1
        self.counts.bytes += load.nbytes

    def _is_stale(self, number: int) -> bool:
        """Whether the host's tensors have changed since a copy began that has ended."""
        load = self._held[number]
        stale = load.task.done and load.stamps != (self._steps.count, self._units[number].stamps())
        self.counts.stale += stale
        return stale

    def _wait(self, number: int) -> None:
        start = time.perf_counter()
        self._executor.wait(self._held[number].task)
        self.counts.waited += time.perf_counter() - start


class _Steps:
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
