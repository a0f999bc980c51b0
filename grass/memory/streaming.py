"""What training holds when units of the model visit the device (:mod:`grass.streaming`), and how long a step takes.

On the device are the ends, three units, their inputs, and gradients of two units on their way down. The host has the
model, its gradients, and the state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from grass.machine.rates import Machine
from grass.memory.architecture import Architecture
from grass.memory.methods import Holdings, active_index_bytes, active_sizes, scale_bytes
from grass.memory.offloading import parameters
from grass.memory.setting import Setting
from grass.offload.tasks import Task, makespan
from grass.streaming.prefetch import AHEAD

UNITS_OF_GRADIENTS = 2
"""Units whose gradients may be on the device: those that backward computes, and those that go down."""
INPUTS = 3
"""Inputs of units on the device where the host keeps them: one in use, one that comes, one that goes."""


class Visiting(NamedTuple):
    """The units of a model that is streamed.

    Attributes:
        number: how many there are.
        nbytes: of one.
        cached: how many stay on the device beside the three that are in use or come next.
        update: bytes of what a step changes in one, if these are rows; ``None``: all of it.
    """

    number: int
    nbytes: int
    cached: int
    update: int | None

    @property
    def on_device(self) -> int:
        """Units that are on the device at most."""
        return min(self.number, AHEAD + 1 + self.cached)

    @property
    def loads(self) -> int:
        """Whole units that a step copies: in forward and backward those that are not there or have changed."""
        return 2 * self.number - self.on_device * (1 if self.update is None else 2)

    @property
    def bytes_up(self) -> int:
        """Bytes that a step copies to the device."""
        return self.loads * self.nbytes + self.on_device * (self.update or 0)


def visiting(held: Holdings, model: Architecture, setting: Setting) -> Visiting:
    """The units, where ``held`` is what the resident model holds."""
    indices = active_index_bytes(held, model, setting)
    size = (held.weights - model.ends * setting.dtype.itemsize) // model.layers + indices
    update = indices + _written(held, model, setting) if held.active_rows else None
    return Visiting(model.layers, size, min(model.layers, setting.cache // size), update)


def streamed(held: Holdings, model: Architecture, setting: Setting) -> Holdings:
    """What the streamed model holds, where ``held`` is what the resident one with ``offload`` does."""
    units, ends = visiting(held, model, setting), model.ends * setting.dtype.itemsize
    inputs = min(model.layers, INPUTS) if setting.host_activations else model.layers
    gradients = UNITS_OF_GRADIENTS * (held.layer_gradients + held.refresh_layer_gradients) + held.refresh_layer
    activations = round(model.layers * held.traced.block_input) if setting.host_activations else 0
    return replace(
        held,
        weights=ends + units.on_device * units.nbytes,
        active_rows=0,
        layer_gradients=0,
        refresh_layer=0,
        refresh_layer_gradients=0,
        layer_workspace=held.layer_workspace + gradients,
        step_workspace=0,
        inputs=inputs,
        host=held.host._replace(activations=activations),
    )


def step_seconds(method: str, held: Holdings, model: Architecture, setting: Setting, machine: Machine) -> float:
    """Predicted seconds of a step that follows another one."""

    def seconds(task: Task) -> float:
        return task.amount / machine.compute_rate if task.resource == "compute" else machine.seconds(task)

    one, two = (makespan(_steps(count, method, held, model, setting), seconds) for count in (2, 3))
    return two - one


def _steps(count: int, method: str, held: Holdings, model: Architecture, setting: Setting) -> list[Task]:
    """The tasks of some steps. The sizes of blocks are those of the first one."""
    block = [p for name, p in parameters(method, model, setting) if name == "block 0"]
    elements, down = sum(p.elements for p in block), sum(p.down for p in block)
    units, run = visiting(held, model, setting), _Run()
    weights = model.flops_elements
    forward = 2 * setting.tokens * weights
    backward = forward * (2 + elements / weights)  # again, gradients of inputs, and of what is trained
    updates: list[Task | None] = [None] * units.number
    for _ in range(count):
        for i, update in enumerate(updates):
            there = i < units.on_device and units.update is not None
            run.unit(f"forward {i}", forward, units, update, (units.update or 0) if there else units.nbytes)
        run.add("head", "compute", 6 * setting.tokens * model.head)
        for i in reversed(range(units.number)):
            is_there = i >= units.number - units.on_device
            done = run.unit(f"backward {i}", backward, units, None, 0 if is_there else units.nbytes)
            sent = run.add(f"gradient {i}", "down", down, done)
        updates = [run.add(f"update {i}", "host", elements, sent) for i in range(units.number)]
    return run.tasks


class _Run:
    """A list of tasks that grows.

    Attributes:
        tasks: so far.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._used: list[Task] = []

    def add(self, name: str, resource: str, amount: float, *after: Task | None) -> Task:
        """Append a task."""
        self.tasks.append(Task(name, resource, amount, tuple(task for task in after if task is not None)))
        return self.tasks[-1]

    def unit(self, name: str, flops: float, units: Visiting, update: Task | None, nbytes: int) -> Task:
        """Use a unit after these bytes of it have come into the place of the one that was used longest ago."""
        if nbytes:
            free = self._used[-units.on_device] if len(self._used) >= units.on_device else None
            update = self.add(f"{name} load", "up", nbytes, update, free)
        self._used.append(self.add(name, "compute", flops, update))
        return self._used[-1]


def _written(held: Holdings, model: Architecture, setting: Setting) -> int:
    """Bytes of a unit's active rows in their weights, and of all that is stepped whole."""
    e, every = setting.dtype.itemsize, active_sizes(model, setting)
    rows = sum((r + q) * width for r, q, width in every)
    return rows * (1 if held.codes else e) + model.vectors * e + (scale_bytes(model, setting) if held.codes else 0)
