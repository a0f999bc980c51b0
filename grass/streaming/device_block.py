"""A unit on the device: its tensors there, and the copies that bring them and keep them as the host has them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from grass.machine.link import Link
from grass.offload.tasks import Task
from grass.selection.projector import Projector
from grass.streaming.host_block import Change, HostBlock, Version, outgoing


@dataclass
class Counts:
    """What was copied so far.

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


class DeviceBlock:
    """A unit's tensors on the device.

    Of a converted weight that one step has changed only the rows come that the step has written.

    Args:
        unit: on the host.
        link: to the device.

    Attributes:
        tensors: on the device, in the order of the unit's places.
        version: of the host's tensors when the last copy began; ``None`` before.
        task: the last copy.
    """

    task: Task

    def __init__(self, unit: HostBlock, link: Link) -> None:
        self._unit, self._link = unit, link
        self.tensors = unit.room_on(link.device)
        self.version: Version | None = None
        self._rows: dict[int, Tensor] = {}
        self._arrived: list[Change] = []

    def begin(self, counts: Counts) -> None:
        """Make the task that copies what differs from the host's tensors once their step has ended."""
        unit = self._unit
        self._rows = unit.room_for_rows(self._link.device, late=self.version is None)
        mark = self._link.mark()

        def work() -> None:
            unit.wait()
            now = unit.version()
            unit.wait()  # for a step that began meanwhile, which the version has counted
            changes, self.version, start = unit.changes(self.version, now), now, time.perf_counter()
            for change in changes:
                counts.bytes += self._copy(change, mark)
            is_whole = sum(change.rows is None for change in changes) == len(unit.places)
            if self._link.device.type == "cpu":  # without streams, this thread may do the device's work
                self.arrive()
            counts.loads += is_whole
            counts.updates += not is_whole
            counts.copying += time.perf_counter() - start

        self.task = Task(unit.name, "up", 0, work=work)

    def arrive(self) -> None:
        """Write rows that have come into their weights."""
        for change in self._arrived:
            layer, there = change.layer, self.tensors[change.number]
            assert layer is not None
            assert change.rows is not None
            rows = Projector(change.rows.to(there.device), None, layer.dim)
            layer.put(there, rows, self._rows[change.number])
        self._arrived, self._rows = [], {}

    def _copy(self, change: Change, mark: torch.Event | None) -> int:
        """Copy what a change says; returns the bytes."""
        if change.rows is None or change.layer is None:
            source, there = outgoing(self._unit.places[change.number].get()), self.tensors[change.number]
        else:
            source, there = change.layer.current(change.rows).contiguous(), self._rows[change.number]
            self._arrived.append(change)
        self._link.up(source, there, mark)
        return source.nbytes
