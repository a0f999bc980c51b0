"""One batch on unlike machines: how much of it each takes, and which of them keep the model in host memory.

Each machine takes the fastest way that fits its memory: the model resident, or streamed (:func:`grass.stream`) with as
many units on the device as there is room for. Batches are divided by :mod:`grass.machine.division`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from grass.machine.profile import Profile, doubled
from grass.machine.rates import Machine
from grass.memory.architecture import Architecture
from grass.memory.duration import flops_per_token
from grass.memory.fits import last
from grass.memory.methods import METHODS
from grass.memory.planner import Plan, plan
from grass.memory.setting import Setting
from grass.memory.streaming import step_seconds, visiting
from grass.streaming.prefetch import AHEAD

METHOD = "Grass"
CONTEXT = 5 * 10**8
"""Bytes of a device that no plan counts: CUDA's context."""
EVERY = 64
"""Up to this micro-batch each size has its own time; beyond, times are interpolated."""
TOO_FAST = 2.0
"""Measured times that need so many times the operations of a large product are those of another model."""


@dataclass(frozen=True)
class Way:
    """How a machine trains a micro-batch.

    Attributes:
        setting: of its ``batch_size``, with ``stream`` and ``cache``.
        plan: its memory.
        seconds: of forward and backward; where the model is streamed, also of copies and updates.
        units: on the device, of all, where the model is streamed.
    """

    setting: Setting
    plan: Plan
    seconds: float
    units: tuple[int, int] | None = None

    def __str__(self) -> str:
        return "resident" if self.units is None else "streamed, {} of {} units there".format(*self.units)


@dataclass(frozen=True)
class Rank:
    """A machine that takes a part of the batch.

    Attributes:
        machine: its rates.
        model: that it trains.
        setting: how; the batch, and whether it streams, are chosen.
        memory: bytes of its device.
        host: bytes of its host memory; ``None``: any.
        measured: times of the resident model on it; ``None``: they follow from the rates.

    Raises:
        ValueError: the measured times are those of a smaller model.
    """

    machine: Machine
    model: Architecture
    setting: Setting
    memory: int
    host: int | None = None
    measured: Profile | None = None

    @property
    def name(self) -> str:
        """Name of the hardware."""
        return self.machine.name or "a machine without a name"

    def flops(self, size: int) -> float:
        """Floating-point operations of so many samples."""
        return size * self.setting.seq_len * flops_per_token(METHOD, self.model, self.setting)

    @cached_property
    def rates(self) -> Machine:
        """The machine with the compute rate that training reaches, where its time was measured."""
        if self.measured is None:
            return self.machine
        size = max(self.measured.seconds)
        reached = self.flops(size) / self.measured.seconds[size]
        if reached > TOO_FAST * self.machine.compute_rate:
            raise ValueError(
                f"The times of {self.name} are those of another model or sequence length: {size} samples of this one "
                f"in {self.measured.seconds[size]:.3g} s need {reached / 1e12:.3g} TFLOP/s, the machine has "
                f"{self.machine.compute_rate / 1e12:.3g}"
            )
        return replace(self.machine, compute_rate=reached)

    def way(self, size: int) -> Way | None:
        """The fastest way for a micro-batch of so many samples; ``None`` if there is not enough memory for any."""
        ways = [way for way in (self.resident(size), self.streamed(size)) if way is not None]
        return min(ways, key=lambda way: way.seconds, default=None)

    def resident(self, size: int) -> Way | None:
        """Train so many samples with the whole model on the device; ``None`` where it does not fit."""
        setting = replace(self.setting, batch_size=size)
        needed = plan(METHOD, self.model, setting)
        seconds = self.flops(size) / self.rates.compute_rate if self.measured is None else self.measured.predict(size)
        return Way(setting, needed, seconds) if needed.fits(self.memory, self.host) else None

    def streamed(self, size: int) -> Way | None:
        """Train them with as many units on the device as fit; ``None`` also where blocks are not checkpointed."""
        if not self.setting.checkpointing:
            return None
        setting = replace(self.setting, batch_size=size, offload=True, stream=True)
        unit = visiting(METHODS[METHOD](self.model, setting), self.model, setting).nbytes

        def with_cache(count: int) -> Setting:
            return replace(setting, cache=(count - 1) * unit)

        def fits(count: int) -> bool:
            return plan(METHOD, self.model, with_cache(count)).fits(self.memory, self.host)

        count = last(fits, max(1, self.model.layers - AHEAD), 1)
        if count is None:
            return None
        largest = with_cache(count)
        held = METHODS[METHOD](self.model, largest)
        units = visiting(held, self.model, largest)
        seconds = step_seconds(METHOD, held, self.model, largest, self.rates)
        return Way(largest, plan(METHOD, self.model, largest), seconds, (units.on_device, units.number))

    def profile(self, most: int) -> Profile:
        """Seconds of micro-batches of up to ``most`` samples, each in its fastest way."""
        way = lru_cache(maxsize=None)(self.way)
        largest = last(lambda size: way(size) is not None, most, 1) or 0
        resident = last(lambda size: self.resident(size) is not None, largest, 1) or 0
        sizes = {*range(1, EVERY + 1), *doubled(largest), resident, resident + 1} & set(range(1, largest + 1))
        return Profile(self.name, {size: one.seconds for size in sorted(sizes) if (one := way(size))}, largest)


def read_rank(path: Path, model: Architecture, setting: Setting, gpu: int | None, host: int | None) -> Rank:
    """The rank in a file of rates, or of times that ``grass.distributed.deal(profile=...)`` has measured.

    Args:
        path: the file.
        model: what is trained.
        setting: how.
        gpu: bytes of the device; ``None``: those in the file.
        host: bytes of its host memory; ``None``: any.

    Raises:
        ValueError: it is no such file, or does not say how fast the machine is or how much memory it has.
    """
    measured = None
    try:
        machine = Machine.read(path)
    except ValueError:
        measured = Profile.read(path)
        if measured.rates is None or not measured.seconds:
            raise ValueError(f"{path} has no rates beside its times, or no times: measure again") from None
        machine = measured.rates
    if measured is None and math.isinf(machine.compute_rate):
        raise ValueError(f"{path} does not say how fast {machine.name!r} computes: measure again")
    if gpu is None and not machine.memory > CONTEXT:
        raise ValueError(f"{path} does not say how much memory {machine.name!r} has: add --gpu")
    memory = machine.memory - CONTEXT if gpu is None else gpu
    return Rank(machine, model, setting, memory, host, measured)
