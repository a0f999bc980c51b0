"""Which units are on the device: the one in use, those that come next, and as many others as a cache has room for.

The order of uses is recorded while it happens, and taken to happen again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grass.machine.link import Link
from grass.offload.executor import Executor
from grass.streaming.device_block import Counts, DeviceBlock
from grass.streaming.host_block import HostBlock, count_steps

AHEAD = 2
"""Units that come before they are needed. With the one in use, three are on the device beside those in the cache."""
FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"


class Use(NamedTuple):
    """One use of one unit.

    Attributes:
        unit: its number.
        kind: forward with gradients, backward (which runs the forward again), or inference.
    """

    unit: int
    kind: str

    def ends_a_batch(self, following: Use) -> bool:
        """Whether the optimizer may step between this use and the following one."""
        return self.kind == BACKWARD and following.kind != BACKWARD


class Order:
    """What followed on each use the last time.

    Before that is known: forward through the units, back, and again; inference through the units, and again.

    Args:
        count: the number of units.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._followers: dict[Use, Use] = {}
        self._last: Use | None = None

    def note(self, use: Use) -> None:
        """Record a use. Several of one kind in a row count as one."""
        if self._last is not None and self._last != use:
            self._followers[self._last] = use
        self._last = use

    def ahead(self, use: Use) -> Iterator[tuple[int, bool]]:
        """The units in the order of their next use, from ``use`` on, each once.

        Yields:
            The unit, and whether the optimizer may step before.
        """
        seen, stepped = {use.unit}, False
        yield use.unit, stepped
        for _ in range(4 * self._count):  # a forward, a backward, and the forward after them
            following = self._following(use)
            stepped = stepped or use.ends_a_batch(following)
            use = following
            if use.unit not in seen:
                seen.add(use.unit)
                yield use.unit, stepped

    def _following(self, use: Use) -> Use:
        known = self._followers.get(use)
        if known is not None:
            return known
        last = self._count - 1
        if use.kind == BACKWARD:
            return Use(use.unit - 1, BACKWARD) if use.unit else Use(0, FORWARD)
        if use.unit < last:
            return Use(use.unit + 1, use.kind)
        return Use(last, BACKWARD) if use.kind == FORWARD else Use(0, INFERENCE)


class Prefetcher:
    """Copies units to the device before they are used.

    Args:
        units: in order.
        link: to the device.
        executor: runs the copies.
        cache: bytes of units that stay on the device, beside the one in use and the next two.

    Attributes:
        counts: what was done so far.
    """

    def __init__(self, units: list[HostBlock], link: Link, executor: Executor, cache: int) -> None:
        self._units, self._link, self._executor, self._cache = units, link, executor, cache
        self._order = Order(len(units))
        self._held: dict[int, DeviceBlock] = {}
        self._infers = False
        count_steps(units)
        self.counts = Counts()

    @property
    def device(self) -> torch.device:
        """Where the units come to."""
        return self._link.device

    def use(self, number: int, kind: str, *, probe: bool) -> list[Tensor]:
        """The tensors of a unit on the device, as the host has them now. The next units begin to come.

        Args:
            number: of the unit.
            kind: of the use, one of ``FORWARD``, ``BACKWARD`` and ``INFERENCE``.
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
                self._load(other)
        unit.wait()
        unit.sync(probe=probe)
        self._wait(number)
        self._load(number)  # again if something has changed it meanwhile
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
        block = self._held[number]
        return not block.task.done or block.version == self._units[number].version()

    def _load(self, number: int) -> None:
        """Queue the copy of what a unit lacks on the device, unless a copy is on its way."""
        if number in self._held:
            if self._is_current(number):
                return
            self._wait(number)
        else:
            self._held[number] = DeviceBlock(self._units[number], self._link)
        block = self._held[number]
        block.begin(self.counts)
        self._executor.submit([block.task])

    def _wait(self, number: int) -> None:
        start = time.perf_counter()
        self._executor.wait(self._held[number].task)
        self.counts.waited += time.perf_counter() - start
        self._held[number].arrive()
