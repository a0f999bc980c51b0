"""The step of an optimizer whose state is on the host: three tasks for each parameter, which overlap.

``optimizer.step`` queues, parameter by parameter in forward order, the gradient's way down, the update on the host, and
the values' way up, and returns. The next forward waits for each parameter when it comes to it
(:mod:`grass.offload.gate`). Nothing is stale: the next forward sees every weight stepped by this gradient.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from grass.compact_mode.layer import CompactLayer
from grass.offload.executor import Executor
from grass.offload.gate import Gate
from grass.offload.link import Link
from grass.offload.options import Offload
from grass.offload.replicas import LayerReplica, Replica, to_host
from grass.offload.tasks import Task
from grass.options import Options
from grass.parallel.background import Background
from grass.parallel.shards import is_sharded
from grass.state.refresh import refresh_due
from grass.state.schema import State, shared_steps
from grass.stepping.whole import WholeStep

logger = logging.getLogger("grass")

Groups = list[dict[str, Any]]


class Engine:
    """``optimizer.offload``: the replicas of an optimizer's parameters, and what steps them.

    Attributes:
        options: as the user gave them.
    """

    def __init__(self, options: Offload) -> None:
        self.options = options
        self._executor = Executor(deadline=options.deadline)
        self._links: dict[torch.device, Link] = {}
        self._replicas: dict[Tensor, Replica] = {}
        self._pending: dict[Tensor, Task] = {}
        self._gate = Gate(self.finish)
        self.last_tasks: list[Task] = []

    def step(self, groups: Groups, whole: WholeStep) -> None:
        """Queue the step of all parameters that have a gradient."""
        host = WholeStep({}, {}, whole.ranks, Background(), {}, chosen=whole.chosen)
        tasks: dict[Tensor, list[Task]] = {}
        together = not self.options.overlap
        host.options.update((id(group), _fixed(Options.of(group))) for group in groups)
        every = [(p, group) for group in groups for p in group["params"]]
        for position, (p, group) in enumerate(every):
            if p.grad is not None:
                options = host.options[id(group)]
                together |= whole.ranks.group is not None and _chooses(whole.states[p], options)
                replica = self._enter(p, whole, host, options)
                tasks[p] = self._tasks(replica, host, group, position)
        self._gate.watch(tasks)
        self._submit(tasks)
        self.finish(tasks if together else [p for p in tasks if not self._is_waited_for(p)])

    def finish(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Wait until parameters have the values that the last step gave them; by default all.

        Raises:
            RuntimeError: a copy or an update has failed, or takes longer than the deadline.
        """
        for p in list(self._pending) if parameters is None else parameters:
            task = self._pending.get(p)
            if task is not None:
                self._executor.wait(task)
                if self._pending.pop(p, None) is not None:
                    with torch.inference_mode(False), torch.no_grad():  # sketches are made here
                        self._replicas[p].arrive()

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
            logger.warning("Grass: the last step of a dropped optimizer did not end: %s", error)

    def rebuild(self, states: dict[Tensor, State]) -> None:
        """Bring loaded state to the host; replicas are made again from the parameters."""
        self._replicas.clear()
        for state in states.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    state[key] = to_host(value)

    def link(self, device: torch.device) -> Link:
        """The link to a device."""
        if device not in self._links:
            self._links[device] = Link(device, bytes_per_second=self.options.bytes_per_second)
        return self._links[device]

    def _replica(self, p: Tensor, layer: CompactLayer | None) -> Replica:
        replica = self._replicas.get(p)
        if replica is None or not replica.is_current():
            if is_sharded(p):
                raise ValueError("offload takes whole parameters, got a DTensor, as FSDP2 and tensor parallelism make")
            if layer is not None and layer.weights:
                raise ValueError(f"offload does not take weights={layer.weights!r}: convert with weights=None")
            self._replicas[p] = replica = Replica(p) if layer is None else LayerReplica(layer)
            if layer is not None:
                layer.arriving = _Arriving(self, p)
        return replica

    def _tasks(self, replica: Replica, host: WholeStep, group: dict[str, Any], position: int) -> list[Task]:
        link = self.link(replica.device.device)
        replica.begin(link, decays_all=host.options[id(group)].decay == "all")
        name = _name(group, replica, position)
        down = Task(f"{name} gradient", "down", replica.bytes_down(), work=lambda: replica.take(link))
        update = Task(
            f"{name} update",
            "host",
            replica.host.numel(),
            after=(down,),
            work=lambda: host.advance(group, [(position, replica.host)]),
        )
        up = Task(f"{name} values", "up", replica.bytes_up(), after=(update,), work=lambda: replica.give(link))
        return [down, update, up]

    def _enter(self, p: Tensor, whole: WholeStep, host: WholeStep, options: Options) -> Replica:
        """Put a parameter's replica in its place in the host's step."""
        replica, state = self._replica(p, whole.layers.get(id(p))), whole.states[p]
        host.states[replica.host] = state
        if replica.layer is not None:
            host.layers[id(replica.host)] = replica.layer
        if p in whole.given_norms and (not state or ("indices" in state and refresh_due(state, options))):
            host.given_norms[replica.host] = whole.given_norms.pop(p).cpu()
        whole.stepped.add(id(p))
        return replica

    def _submit(self, tasks: dict[Tensor, list[Task]]) -> None:
        order = self._gate.order(list(tasks))
        self.last_tasks = [task for p in order for task in tasks[p]]
        increment_version([tensor for p in order for tensor in self._replicas[p].stepped()])
        for p in order:
            self._replicas[p].depart()
        self._pending = {p: tasks[p][-1] for p in order}
        self._executor.submit(self.last_tasks)

    def _is_waited_for(self, p: Tensor) -> bool:
        return self._replicas[p].layer is not None or self._gate.guards(p)


class _Arriving:
    """Waits for the active rows of a layer; the layer calls it before it reads its values."""

    def __init__(self, engine: Engine, p: Tensor) -> None:
        self._engine, self._p = weakref.ref(engine), weakref.ref(p)

    @torch.compiler.disable(reason="it waits for the host")  # type: ignore[misc]
    def __call__(self) -> None:
        engine, p = self._engine(), self._p()
        if engine is not None and p is not None:
            engine.finish([p])

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copied layer waits for nothing


def _fixed(options: Options) -> Options:
    """The options as they are now: a scheduler may change the learning rate before the host reads it."""
    return replace(options, lr=float(options.lr))


def _chooses(state: State, options: Options) -> bool:
    """Whether the coming step may select rows, for which ranks communicate; compact mode does so after its update."""
    after = "indices" in state and shared_steps(state) + 1 >= options.update_interval
    return not state or after or ("indices" in state and refresh_due(state, options))


def _name(group: dict[str, Any], replica: Replica, position: int) -> str:
    if replica.layer is not None and replica.layer.label:
        return replica.layer.label
    return f"parameter {position}"
