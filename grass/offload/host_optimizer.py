"""The step of an optimizer whose state is on the host: three tasks for each parameter, which overlap.

``optimizer.step`` queues, parameter by parameter in forward order, the gradient's way down, the update on the host, and
the values' way up, and returns. The next forward waits for each parameter when it comes to it
(:mod:`grass.offload.forward_hooks`). Nothing is stale: the next forward sees every weight stepped by this gradient.
Some parameters may be stepped by the device instead (:mod:`grass.offload.device_step`).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.refresh_cycle import check_sharding
from grass.machine.link import Link
from grass.machine.numa import prepare_thread
from grass.offload.device_step import DeviceStep, state_bytes
from grass.offload.executor import Executor
from grass.offload.forward_hooks import ActiveRowsHook, ForwardHooks, Use
from grass.offload.fraction import Tuning
from grass.offload.host_copies import HostCopy, InPlace, LayerCopy, MasterCopy
from grass.offload.host_storage import HostStorage, bytes_on_host, is_on_host, note_step
from grass.offload.options import Offload
from grass.offload.progress import Changed, Stage, stamp_of
from grass.offload.record import Record
from grass.offload.rescue import check_states, check_values, forget_steps, rescue, restorer
from grass.offload.tasks import ParameterStep, Task, placement, schedule
from grass.offload.timeline import save
from grass.options import Options
from grass.parallel.shards import is_sharded, local
from grass.parallel.versions import count_writes
from grass.state.refresh import is_due, may_be_due
from grass.state.schema import State
from grass.stepping.optimizer_step import OptimizerStep
from grass.stepping.plain import is_rounded

logger = logging.getLogger("grass")

Groups = list[dict[str, Any]]


class HostOptimizer:
    """``optimizer.offload``: the host's copies of an optimizer's parameters, and what steps them.

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
        self._records: dict[Tensor, Record] = {}
        self._pending: dict[Tensor, Task] = {}
        self._has_room = False
        self._storage = HostStorage(options.path)
        self._hooks = ForwardHooks(self.wait_for)
        self._tuning = Tuning(options.fraction)

    def step(self, groups: Groups, whole: OptimizerStep) -> None:
        """Queue the step of all parameters that have a gradient.

        The first is waited for: code that takes it to have state, as ``set_optimizer_state_dict``, reads this next. If
        this is interrupted, either all of them step, beside the caller, or nothing has happened.
        """
        restore, self.last_tasks, chooses, is_first = restorer(whole), [], False, not whole.states
        try:
            unguarded, chooses, host = self._queue(groups, whole)
        except BaseException:
            if not any(map(self._executor.has, self.last_tasks)):
                self._pending = {}
                restore()
            raise
        self.finish(None if is_first else unguarded)
        if chooses:
            host.ranks.verify_selection(host.chosen)

    def _queue(self, groups: Groups, whole: OptimizerStep) -> tuple[list[Tensor], bool, OptimizerStep]:
        """Queue a step; returns what nobody waits for later, whether rows are chosen, and the host's part."""
        host, device = whole.part(self._storage.meshes.ranks(whole.ranks)), whole.part(whole.ranks)
        for group in groups:
            host.options[id(group)] = device.options[id(group)] = _fixed_options(group)
        queued = self._queued(groups, whole.layers)
        if not self._has_room:
            self._check_room(queued, whole, host)
        chooses = whole.ranks.group is not None and any(
            may_be_due(whole.states[record.parameter], host.options[id(record.group)]) for record in queued
        )
        fraction = 0.0 if chooses else self._tuning.fraction  # ranks communicate in one order: in one thread
        there = placement(fraction, [record.parameter.numel() for record in queued])
        steps = [
            self._step_on_device(record, whole, device)
            if is_there and not is_on_host(record.parameter)
            else self._step_on_host(record, whole, host)
            for record, is_there in zip(queued, there, strict=True)
        ]
        self._submit(queued, steps, whole)
        everything = chooses or not self.options.overlap
        parameters = [record.parameter for record in queued]
        return [p for p in parameters if everything or not self._is_waited_for(p, whole)], chooses, host

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
            if (copy := self._records[p].copy) is not None:
                self._arrive(copy)
            self._pending.pop(p, None)
        if parameters is None:
            self._learn()

    def _arrive(self, copy: HostCopy) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():  # sketches are made here
                copy.arrive()
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
            if self._executor.fault is None:
                raise
            self._executor.rest()
            if self._pending:
                rescue([self._records[p] for p in self._pending], self.link)
                forget_steps(self._pending)
                self._pending = {}
                for record in self._records.values():
                    record.forget()

    def settle_values(self, parameters: Iterable[Tensor] | None = None) -> None:
        """As :meth:`settle`, before parameters are saved. Raises ``RuntimeError`` if the values of any are lost."""
        self.settle(parameters)
        check_values(self._records.values(), self._executor.fault)

    def settle_states(self) -> None:
        """As :meth:`settle`, before state is saved. Raises ``RuntimeError`` if the state of any parameter is lost."""
        self.settle()
        check_states(self._records.values(), self._executor.fault)

    def wait_for(self, parameters: Iterable[Tensor], before: Use = "forward") -> None:
        """Wait for parameters before they are used."""
        {"forward": self.finish, "saving": self.settle_values, "loading": self.settle}[before](parameters)

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
        """Move loaded state to the host; copies are made again from the parameters. An earlier fault is over."""
        if self._executor.fault is not None:
            self._executor = Executor(deadline=self.options.deadline)
        for record in self._records.values():
            record.forget()
            record.stored, record.lost = {}, None
        for state in states.values():
            self._storage.to_host_(state)

    def link(self, device: torch.device) -> Link:
        """The link to a device."""
        if device not in self._links:
            self._links[device] = Link(device, bytes_per_second=self.options._bytes_per_second)
        return self._links[device]

    def plan(self, fraction: float) -> list[Task]:
        """The tasks of a step in which the device takes this fraction, without work."""
        records = [self._records[p] for p in self._hooks.order(list(self._records))]
        there = placement(fraction, [r.elements for r in records])
        steps = [
            ParameterStep("", on_device, r.elements, *((r.state, r.state) if on_device else (r.down, r.up)))
            for r, on_device in zip(records, there, strict=True)
        ]
        return self.schedule(steps)[0]

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Wait for the last step and show when each of its tasks ran: :func:`grass.offload.timeline.save`."""
        self.finish()
        save(self.last_tasks, path)

    def __repr__(self) -> str:
        return f"{self.options}: {self._tuning.describe(self.plan, self._measured)}"

    def _queued(self, groups: Groups, layers: dict[int, CompactLayer]) -> list[Record]:
        """The records of the parameters that have a gradient, in forward order."""
        pairs = (zip(group["params"], group.get("param_names", ()), strict=False) for group in groups)
        names = {p: str(name) for named in pairs for p, name in named}
        every = enumerate((p, group) for group in groups for p in group["params"])
        with_gradient = [(i, *pair) for i, pair in every if pair[0].grad is not None]
        found = {p: self._record(p, i, group, _name(p, i, layers, names)) for i, p, group in with_gradient}
        self._hooks.watch(found)
        return [found[p] for p in self._hooks.order(list(found))]

    def _record(self, p: Tensor, position: int, group: dict[str, Any], name: str) -> Record:
        """The record of a parameter, made in the first step that it has a gradient in."""
        if (record := self._records.get(p)) is None:
            record = self._records[p] = Record(p, name, group, position)
        record.name, record.group, record.position = name, group, position
        return record

    def _check_room(self, queued: list[Record], whole: OptimizerStep, host: OptimizerStep) -> None:
        """Before the first step, check that the host has room for copies and state."""
        if any(is_sharded(record.parameter) for record in queued):
            self._tuning = Tuning(0.0)
        every = (
            bytes_on_host(r.parameter, whole.layers.get(id(r.parameter)), host.options[id(r.group)], self.options)
            for r in queued
        )
        self._storage.check_room(sum(every))
        self._has_room = bool(queued)

    def _step_on_host(self, record: Record, whole: OptimizerStep, host: OptimizerStep) -> ParameterStep:
        """The step of a parameter by the host."""
        p = record.parameter
        layer, link, state = whole.layers.get(id(p)), self.link(p.device), whole.states[p]
        copy = self._host_copy(record, layer, state)
        host.states[copy.host] = state
        _replace_parameter(copy.host, copy.layer, record, whole, host)
        copy.begin(link, decays_all=host.options[id(record.group)].decay == "all")
        record.elements, record.state = local(p.detach()).numel(), state_bytes(state)
        record.down, record.up = copy.bytes_down(), copy.bytes_up()
        update = partial(self._update, host, record, copy)
        down, up = partial(copy.take, link), partial(_give, copy, link)
        return ParameterStep(record.name, False, record.elements, record.down, record.up, down, update, up)

    def _update(self, host: OptimizerStep, record: Record, copy: HostCopy) -> None:
        """Step a parameter on the host, in the executor's thread."""
        prepare_thread(self.options.threads, self.options.numa, record.parameter.device)
        copy.stage = Stage.STEPPING
        copy.step(host, record.group, record.position)
        self._storage.store_(host.states[copy.host], record.stored)
        copy.stage = Stage.STEPPED

    def _step_on_device(self, record: Record, whole: OptimizerStep, device: OptimizerStep) -> ParameterStep:
        """The step of a parameter by the device."""
        p, group = record.parameter, record.group
        layer, link, state = whole.layers.get(id(p)), self.link(p.device), whole.states[p]
        has_master, is_current = layer is None and self.options.has_master(p), record.stamp == stamp_of(p)
        step = DeviceStep(
            p,
            state,
            layer,
            self._storage,
            counts_on_host=is_rounded(p, group) and not has_master,
            has_master=has_master,
            is_current=is_current,
        )
        record.by, record.state = step, state_bytes(state)
        self._watch(p, layer)
        _replace_parameter(step.parameter, layer, record, whole, device)
        update = partial(step.step, device, group, record.position)
        down, up = partial(step.down, link), partial(step.up, link)
        return ParameterStep(record.name, True, p.numel(), record.state, record.state, down, update, up)

    def _host_copy(self, record: Record, layer: CompactLayer | None, state: State) -> HostCopy:
        """The copy of a parameter, with its values."""
        p = record.parameter
        if (copy := record.copy) is None or not copy.is_current():
            self._watch(p, layer)
            has_master = layer is None and self.options.has_master(p)
            if is_on_host(p):
                copy = InPlace(p, self._storage, layer, state if has_master else None)
            elif layer is not None:
                copy = LayerCopy(layer, self._storage)
            elif has_master:
                copy = MasterCopy(p, self._storage, state)
            else:
                copy = HostCopy(p, self._storage)
            record.by = copy
        return copy

    def _watch(self, p: Tensor, layer: CompactLayer | None) -> None:
        """Make a converted layer wait for its rows.

        Raises:
            ValueError: the parameter cannot be offloaded.
        """
        if is_sharded(p):
            self.options.check_sharded(p)
        if layer is not None:
            check_sharding(layer)
            ActiveRowsHook.watch(layer, self.wait_for)

    def _submit(self, queued: list[Record], steps: list[ParameterStep], whole: OptimizerStep) -> None:
        tasks, ends = self.schedule(steps)
        parameters = [record.parameter for record in queued]
        layers = [whole.layers[id(p)] for p in parameters if id(p) in whole.layers]
        count_writes(parameters + [layer.weight for layer in layers])  # now: the values come later
        for record in self._records.values():
            record.stamp = None
        for record in queued:
            if record.copy is not None:
                record.copy.depart()
            else:
                record.stamp = stamp_of(record.parameter)
        self.last_tasks = tasks
        self._pending = dict(zip(parameters, ends, strict=True))
        for p, end in self._pending.items():
            note_step(p, partial(self._executor.wait, end))
        self._executor.submit(tasks)

    def _learn(self) -> None:
        """Measure the step that has ended."""
        tasks = self.last_tasks
        if tasks and all(task.done for task in tasks) and self._measured is not tasks:
            self._measured = tasks
            self._tuning.learn(tasks, self.plan)

    def _is_waited_for(self, p: Tensor, whole: OptimizerStep) -> bool:
        return self._hooks.guards(p) or (id(p) in whole.layers and not is_sharded(p))


def _give(copy: HostCopy, link: Link) -> None:
    """Copy the stepped values up, in the executor's thread."""
    copy.give(link)
    copy.stage = Stage.GIVEN


def _name(p: Tensor, position: int, layers: dict[int, CompactLayer], names: dict[Tensor, str]) -> str:
    """What errors call a parameter: its layer, or the name that the optimizer was given, if there is one."""
    if id(p) in layers and layers[id(p)].label:
        return layers[id(p)].label
    return names.get(p, f"parameter {position} of shape {tuple(p.shape)}")


def _fixed_options(group: dict[str, Any]) -> Options:
    """A group's options as they are now: a scheduler may change the learning rate before the host reads it."""
    options = Options.of(group)
    return replace(options, lr=float(options.lr))


def _replace_parameter(
    stepped: Tensor, layer: CompactLayer | None, record: Record, whole: OptimizerStep, part: OptimizerStep
) -> None:
    """Let a tensor be stepped in place of a parameter, with its layer and its given norms."""
    p = record.parameter
    whole.stepped.add(id(p))
    if layer is not None:
        part.layers[id(stepped)] = layer
    if p in whole.given_norms and is_due(whole.states[p], part.options[id(record.group)]):
        part.given_norms[stepped] = whole.given_norms.pop(p).to(stepped.device)
