"""The step of an optimizer whose state is on the host: three tasks for each parameter, which overlap.

``optimizer.step`` queues, parameter by parameter in forward order, the gradient's way down, the update on the host, and
the values' way up, and returns. The next forward waits for each parameter when it comes to it
(:mod:`grass.offload.gate`). Nothing is stale: the next forward sees every weight stepped by this gradient. Some
parameters may be stepped by the device instead (:mod:`grass.offload.visits`).
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from grass.compact_mode.cycle import check_sharding
from grass.compact_mode.layer import CompactLayer
from grass.offload.executor import Executor
from grass.offload.gate import Arriving, Gate
from grass.offload.home import Home
from grass.offload.in_place import InPlace
from grass.offload.link import Link
from grass.offload.masters import MasterReplica
from grass.offload.options import Offload
from grass.offload.parts import Place, beside, fixed_options, may_choose, stand_in
from grass.offload.replicas import Changed, LayerReplica, Replica, Stage, stamp_of
from grass.offload.rescue import Before, Losses, forget_steps, rescue
from grass.offload.schedule import Unit, placement, schedule
from grass.offload.sizes import Sizes, bytes_at_home
from grass.offload.tasks import Task, measured_seconds
from grass.offload.threads import prepare_thread
from grass.offload.timeline import save
from grass.offload.tuning import Tuning
from grass.offload.visits import Visit, state_bytes
from grass.parallel.shards import is_sharded, local
from grass.state.schema import State
from grass.stepping.whole import WholeStep

logger = logging.getLogger("grass")

Groups = list[dict[str, Any]]


class Engine:
    """``optimizer.offload``: the replicas of an optimizer's parameters, and what steps them.

    ``print`` shows the measured rates, the fraction, the predicted and the measured step.

    Attributes:
        options: as the user gave them.
        last_tasks: the tasks of the last step, for :mod:`grass.offload.timeline`.
        schedule: makes the tasks of a step; benchmarks compare others with it.
    """

    schedule = staticmethod(schedule)

    def __init__(self, options: Offload) -> None:
        self.options = options
        self.last_tasks = self._measured = list[Task]()
        self._executor = Executor(deadline=options.deadline)
        self._links: dict[torch.device, Link] = {}
        self._replicas: dict[Tensor, Replica] = {}
        self._visited: dict[Tensor, tuple[int, int]] = {}
        self._pending: dict[Tensor, Task] = {}
        self._sizes: dict[Tensor, Sizes] = {}
        self._names: dict[Tensor, str] = {}
        self._home = Home(options.path)
        self._at_home: dict[Tensor, dict[str, Tensor]] = {}
        self._gate = Gate(self)
        self._tuning = Tuning(options.fraction)
        self._visits: dict[Tensor, Visit] = {}
        self._losses = Losses()

    def step(self, groups: Groups, whole: WholeStep) -> None:
        """Queue the step of all parameters that have a gradient.

        If this is interrupted, either all of them step, beside the caller, or nothing has happened.
        """
        before, self.last_tasks, chooses = Before(whole), [], False
        try:
            unguarded, chooses, host = self._queue(groups, whole)
        except BaseException:
            if not any(map(self._executor.has, self.last_tasks)):
                self._pending = {}
                before.restore()
            raise
        self.finish(unguarded)
        if chooses:
            host.ranks.verify_selection(host.chosen)

    def _queue(self, groups: Groups, whole: WholeStep) -> tuple[list[Tensor], bool, WholeStep]:
        """Queue a step; returns what nobody waits for later, whether rows are chosen, and the host's part."""
        host, device = beside(whole, self._home.meshes.ranks(whole.ranks)), beside(whole, whole.ranks)
        for group in groups:
            host.options[id(group)] = device.options[id(group)] = fixed_options(group)
        members = self._members(groups)
        if not self._sizes:
            if any(is_sharded(p) for p, *_ in members):
                self._tuning = Tuning(0.0)
            self._home.check_room(
                sum(
                    bytes_at_home(p, whole.layers.get(id(p)), host.options[id(group)], self.options)
                    for p, group, _ in members
                )
            )
        chooses = whole.ranks.group is not None and any(
            may_choose(whole.states[p], host.options[id(group)]) for p, group, _ in members
        )
        fraction = 0.0 if chooses else self._tuning.fraction  # ranks communicate in one order: in one thread
        there = placement(fraction, [p.numel() for p, *_ in members])
        units = [
            self._visit(m, whole, device) if visits and not InPlace.marks(m[0]) else self._send(m, whole, host)
            for m, visits in zip(members, there, strict=True)
        ]
        self._submit(members, units, whole)
        everything = chooses or not self.options.overlap
        return [p for p, *_ in members if everything or not self._is_waited_for(p, whole)], chooses, host

    def finish(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Wait until parameters have the values that the last step gave them; by default all.

        Raises:
            RuntimeError: a copy or an update has failed, or takes longer than the deadline.
        """
        if parameters is None:
            self._executor.check()
        for p in list(self._pending if parameters is None else parameters):
            task = self._pending.get(p)
            if task is None:
                continue
            self._executor.wait(task)
            if p in self._replicas:
                self._arrive(self._replicas[p])
            self._pending.pop(p, None)
        if parameters is None:
            self._learn()

    def _arrive(self, replica: Replica) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():  # sketches are made here
                replica.arrive()
        except Changed as error:
            self._executor.drain()
            self._executor.fail(str(error))
            raise

    def settle(self, parameters: Iterable[Tensor] | None = None) -> None:
        """As :meth:`finish`, before something is saved or loaded. After a fault, save what can be saved.

        Each parameter then has the values before the step or after it, which :mod:`grass.offload.rescue` decides. The
        fault itself is raised by the next step.
        """
        try:
            self.finish(parameters)
        except RuntimeError:
            if (fault := self._executor.fault) is None:
                raise
            self._executor.rest()
            if self._pending:
                places = {p: self._replicas.get(p) or self._visits[p] for p in self._pending}
                self._losses = rescue(places, self._pending, self.link, fault)
                forget_steps(self._pending)
                self._pending, self._replicas, self._visited = {}, {}, {}

    def settle_values(self, parameters: Iterable[Tensor] | None = None) -> None:
        """As :meth:`settle`, before parameters are saved. Raises ``RuntimeError`` if the values of any are lost."""
        self.settle(parameters)
        self._losses.check_values()

    def settle_states(self) -> None:
        """As :meth:`settle`, before state is saved. Raises ``RuntimeError`` if the state of any parameter is lost."""
        self.settle()
        self._losses.check_states()

    def finish_for(self, optimizer: object) -> None:
        """Let the last step of an optimizer end, although the optimizer itself is dropped."""
        weakref.finalize(optimizer, self._end).atexit = False

    def _end(self) -> None:
        if self._executor.is_own_thread():  # the garbage collector runs in any thread
            threading.Thread(target=self._end, name="grass-end").start()
            return
        try:
            self.finish()
        except RuntimeError as error:
            what = str(error)  # a record of the error itself would keep parameters alive
            logger.warning("Grass: the last step of a dropped optimizer did not end: %s", what)

    def rebuild(self, states: dict[Tensor, State]) -> None:
        """Bring loaded state to the host; replicas are made again from the parameters. An earlier fault is over."""
        if self._executor.fault is not None:
            self._executor = Executor(deadline=self.options.deadline)
        self._losses = Losses()
        self._replicas.clear()
        self._visited.clear()
        self._at_home.clear()
        for state in states.values():
            self._home.bring(state)

    def link(self, device: torch.device) -> Link:
        """The link to a device."""
        if device not in self._links:
            self._links[device] = Link(device, bytes_per_second=self.options.bytes_per_second)
        return self._links[device]

    def plan(self, fraction: float) -> list[Task]:
        """The tasks of a step in which the device takes this fraction, without work."""
        sizes = [self._sizes[p] for p in self._gate.order(list(self._sizes))]
        there = placement(fraction, [s.elements for s in sizes])
        units = [
            Unit("", visits, s.elements, s.state if visits else s.down, s.state if visits else s.up)
            for s, visits in zip(sizes, there, strict=True)
        ]
        return self.schedule(units)[0]

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Wait for the last step and show when each of its tasks ran: :func:`grass.offload.timeline.save`."""
        self.finish()
        save(self.last_tasks, path)

    def __repr__(self) -> str:
        machine, predicted = self._tuning.machine, self._tuning.predicted(self.plan)
        if machine is None or predicted is None:
            return f"{self.options}: nothing measured yet"
        rates = f"{_rate('host', machine.host_rate / 1e6, 'M elements/s')}, "
        rates += _rate("device", machine.device_rate / 1e6, "M elements/s")
        link = f"{_rate('down', machine.down_rate / 1e9, 'GB/s')}, {_rate('up', machine.up_rate / 1e9, 'GB/s')}"
        measured = measured_seconds(self._measured)
        step = f"copies and updates of a step, without forward and backward: predicted {predicted * 1e3:.1f} ms, "
        step += f"measured {measured * 1e3:.1f} ms"
        return f"{self.options}: the device takes {self._tuning.fraction:.0%}; {rates}; {link}; {step}"

    def _members(self, groups: Groups) -> list[Place]:
        """The parameters that have a gradient, in forward order."""
        every = [(p, group) for group in groups for p in group["params"]]
        found = {p: (p, group, i) for i, (p, group) in enumerate(every) if p.grad is not None}
        named = (zip(group["params"], group.get("param_names", ()), strict=False) for group in groups)
        self._names = {p: str(name) for pairs in named for p, name in pairs}
        self._gate.watch(found)
        return [found[p] for p in self._gate.order(list(found))]

    def _send(self, member: Place, whole: WholeStep, host: WholeStep) -> Unit:
        """The unit of a parameter that the host steps."""
        p, group, _ = member
        state, link = whole.states[p], self.link(p.device)
        replica = self._replica(p, whole.layers.get(id(p)), state)
        host.states[replica.host] = state
        stand_in(replica.host, replica.layer, member, whole, host)
        replica.begin(link, decays_all=host.options[id(group)].decay == "all")
        elements = local(p.detach()).numel()
        self._sizes[p] = Sizes(elements, replica.bytes_down(), replica.bytes_up(), state_bytes(state))
        return Unit(
            self._name(member, replica.layer),
            False,
            *self._sizes[p][:3],
            down=partial(replica.take, link),
            update=partial(self._update, host, member, replica),
            up=partial(_give, replica, link),
        )

    def _update(self, host: WholeStep, member: Place, replica: Replica) -> None:
        """Step a parameter on the host, in the executor's thread."""
        p, group, position = member
        prepare_thread(self.options.threads, self.options.numa, p.device)
        replica.stage = Stage.STEPPING
        replica.step(host, group, position)
        self._home.settle(host.states[replica.host], self._at_home.setdefault(p, {}))
        replica.stage = Stage.STEPPED

    def _visit(self, member: Place, whole: WholeStep, device: WholeStep) -> Unit:
        """The unit of a parameter that the device steps."""
        p, group, position = member
        layer, link = whole.layers.get(id(p)), self.link(p.device)
        has_master = layer is None and self.options.has_master(p)
        is_current = self._visited.get(p) == stamp_of(p)
        visit = Visit(p, whole.states[p], layer, self._home, has_master=has_master, is_current=is_current)
        self._replicas.pop(p, None)
        self._visits[p] = visit
        self._watch(p, layer)
        stand_in(visit.parameter, layer, member, whole, device)
        size = state_bytes(whole.states[p])
        self._sizes[p] = self._sizes.get(p, Sizes(p.numel(), p.nbytes, p.nbytes, 0))._replace(state=size)
        return Unit(
            self._name(member, layer),
            True,
            p.numel(),
            size,
            size,
            down=partial(visit.down, link),
            update=partial(visit.step, device, group, position),
            up=partial(visit.up, link),
        )

    def _replica(self, p: Tensor, layer: CompactLayer | None, state: State) -> Replica:
        replica = self._replicas.get(p)
        if replica is None or not replica.is_current():
            self._watch(p, layer)
            has_master = layer is None and self.options.has_master(p)
            if InPlace.marks(p):
                replica = InPlace(p, self._home, layer, state if has_master else None)
            elif layer is not None:
                replica = LayerReplica(layer, self._home)
            elif has_master:
                replica = MasterReplica(p, self._home, state)
            else:
                replica = Replica(p, self._home)
            self._replicas[p] = replica
        return replica

    def _watch(self, p: Tensor, layer: CompactLayer | None) -> None:
        """Make a converted layer wait for its rows.

        Raises:
            ValueError: the parameter cannot be offloaded.
        """
        if is_sharded(p):
            _check_sharded(p, self.options.fraction)
        if layer is not None:
            check_sharding(layer)
            layer.arriving = Arriving(self, p)

    def _submit(self, members: list[Place], units: list[Unit], whole: WholeStep) -> None:
        tasks, ends = self.schedule(units)
        changing = [p for p, *_ in members] + [whole.layers[id(p)].weight for p, *_ in members if id(p) in whole.layers]
        increment_version(changing)  # a graph that saved them is stale
        self._visited = {p: stamp_of(p) for p, *_ in members if p not in self._replicas}
        for p, *_ in members:
            if p in self._replicas:
                self._replicas[p].depart()
        self.last_tasks = tasks
        self._pending = {p: end for (p, *_), end in zip(members, ends, strict=True)}
        for p, end in self._pending.items():
            InPlace.will_end(p, partial(self._executor.wait, end))
        self._executor.submit(tasks)

    def _learn(self) -> None:
        """Measure the step that has ended."""
        tasks = self.last_tasks
        if tasks and all(task.done for task in tasks) and self._measured is not tasks:
            self._measured = tasks
            self._tuning.learn(tasks, self.plan)

    def _name(self, member: Place, layer: CompactLayer | None) -> str:
        """What errors call a parameter: its layer, or the name that the optimizer was given, if there is one."""
        p, _, position = member
        if layer is not None and layer.label:
            return layer.label
        return self._names.get(p, f"parameter {position} of shape {tuple(p.shape)}")

    def _is_waited_for(self, p: Tensor, whole: WholeStep) -> bool:
        return self._gate.guards(p) or (id(p) in whole.layers and not is_sharded(p))


def _give(replica: Replica, link: Link) -> None:
    """Bring the stepped values up, in the executor's thread."""
    replica.give(link)
    replica.stage = Stage.GIVEN


def _check_sharded(p: Tensor, fraction: float | str) -> None:
    """Check that a ``DTensor`` can be offloaded: its state stays on the host, and the parameter is on the device."""
    if p.device.type != p.device_mesh.device_type:  # type: ignore[attr-defined]
        raise ValueError("FSDP2's CPUOffloadPolicy keeps the parameters on the host already: leave it or offload out")
    if fraction not in (0, "auto"):
        raise ValueError(f"Invalid {fraction=} for sharded parameters: must be 0, which leaves their state on the host")


def _rate(resource: str, rate: float, unit: str) -> str:
    return f"{resource} {rate:.3g} {unit}" if math.isfinite(rate) else f"{resource} not used"
