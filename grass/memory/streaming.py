"""What training holds when units of the model visit the device (:mod:`grass.streaming`), and how long a step takes.

On the device are the ends, three units, their inputs, and gradients of two units on their way down. The host has the
model, its gradients, and the state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from grass.memory.architecture import Architecture
from grass.memory.methods import Holdings, Host
from grass.memory.offloading import parameters
from grass.memory.setting import Setting
from grass.offload.machine import Machine
from grass.offload.tasks import Task, simulate
from grass.streaming.loader import AHEAD

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
    """

    number: int
    nbytes: int
    cached: int

    @property
    def on_device(self) -> int:
        """Units that are on the device at most."""
        return min(self.number, AHEAD + 1 + self.cached)

    @property
    def loads(self) -> int:
        """Loads of a step: all units in forward, and in backward those that are not there still."""
        return 2 * self.number - self.on_device


def visiting(held: Holdings, model: Architecture, setting: Setting) -> Visiting:
    """The units, where ``held`` is what the resident model holds."""
    size = (held.weights - model.ends * setting.dtype.itemsize) // model.layers + _indices(model, setting, held)
    return Visiting(model.layers, size, min(model.layers, setting.cache // size))


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
        host=Host(*held.host[:-1], activations),
    )


def step_seconds(method: str, held: Holdings, model: Architecture, setting: Setting, machine: Machine) -> float:
    """Predicted seconds of a step that follows another one."""

    def seconds(task: Task) -> float:
        return task.amount / machine.compute_rate if task.resource == "compute" else machine.seconds(task)

    one, two = (simulate(_steps(count, method, held, model, setting), seconds).makespan for count in (2, 3))
    return two - one


def _steps(count: int, method: str, held: Holdings, model: Architecture, setting: Setting) -> list[Task]:
    """The tasks of some steps. The sizes of blocks are those of the first one."""
    block = [p for name, p in parameters(method, model, setting) if name == "block 0"]
    elements, down = sum(p.elements for p in block), sum(p.down for p in block)
    units, run = visiting(held, model, setting), _Run()
    weights = model.layer_matrix + model.vectors
    forward = 2 * setting.tokens * weights
    backward = forward * (2 + elements / weights)  # again, gradients of inputs, and of what is trained
    updates: list[Task | None] = [None] * units.number
    for _ in range(count):
        for i, update in enumerate(updates):
            run.unit(f"forward {i}", forward, units, update, loads=True)
        run.add("head", "compute", 6 * setting.tokens * model.head)
        for i in reversed(range(units.number)):
            done = run.unit(f"backward {i}", backward, units, None, loads=i < units.number - units.on_device)
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

    def unit(self, name: str, flops: float, units: Visiting, update: Task | None, *, loads: bool) -> Task:
        """Use a unit, after it was loaded into the place of the one that was used longest ago."""
        if loads:
            free = self._used[-units.on_device] if len(self._used) >= units.on_device else None
            update = self.add(f"{name} load", "up", units.nbytes, update, free)
        self._used.append(self.add(name, "compute", flops, update))
        return self._used[-1]


def _indices(model: Architecture, setting: Setting, held: Holdings) -> int:
    """Bytes of the indices of active rows, which a unit brings along."""
    if not held.active_rows:
        return 0
    sizes = [linear.m if setting.dim == 0 else linear.n for linear in model.linears]
    return 8 * sum(setting.rank_of(size) + setting.explored_of(size) for size in sizes)
