"""Parameters that the device steps itself: their state goes to the device for the step and back to the host.

This is how Deep Optimizer States (Maurya et al., 2024, arXiv 2410.21316) uses a device that would otherwise wait for
the host. Weights, gradients and active rows stay where they are. Moments go up and come down again; a bank stays on
the host. The device's memory holds the state of the parameters that are on their way, not that of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.layer import CompactLayer
from grass.machine.link import Link
from grass.offload.host_copies import master_of
from grass.offload.host_storage import HostStorage, same_layout
from grass.offload.progress import GradientSnapshot, Stage
from grass.parallel.shards import local
from grass.state.schema import HOST_KEYS, State
from grass.stepping.optimizer_step import OptimizerStep


class DeviceStep:
    """One step of one parameter on the device.

    Args:
        parameter: on the device.
        state: its state, whose tensors are in host memory.
        layer: the converted layer whose active rows it has.
        storage: where its state lies.
        counts_on_host: whether its step count stays in host memory, where the step reads it.
        has_master: whether its float32 master goes to the device too, and is stepped in its place.
        is_current: whether nothing has changed the parameter since it was rounded from the state's master.

    Attributes:
        parameter: what is stepped on the device.
        stage: how far the step has come.
    """

    def __init__(
        self,
        parameter: Tensor,
        state: State,
        layer: CompactLayer | None,
        storage: HostStorage,
        *,
        counts_on_host: bool = False,
        has_master: bool = False,
        is_current: bool = False,
    ) -> None:
        self._layer, self._storage, self._has_master, self._is_current = layer, storage, has_master, is_current
        self._staying = HOST_KEYS | {"step"} if counts_on_host else HOST_KEYS
        if layer is not None:
            layer.hold_sketch()  # where the loop's zero_grad() cannot drop it
        self._values = parameter.detach()  # keeps the gradient when the loop drops it
        self._values.grad = parameter.grad
        self.parameter: Tensor = self._values
        if has_master:
            placeholder = torch.empty(0, dtype=torch.float32, device=parameter.device)
            self.parameter = nn.Parameter(placeholder, requires_grad=False)
        assert self._values.grad is not None
        self._snapshot = GradientSnapshot(parameter, local(self._values.grad))
        self._state = state
        self._there: dict[str, Any] = {}
        self.stage = Stage.QUEUED

    def up(self, link: Link) -> None:
        """Bring the state to the device."""
        if self._has_master and not (self._is_current and "master" in self._state):
            self._state["master"] = master_of(self._values, self._storage, self._state)
        self._there = dict(self._state)
        for key in _travelling(self._state, self._staying):
            source = self._state[key]
            self._there[key] = torch.empty_like(source, device=self._values.device)
            link.up(source, self._there[key], link.mark())

    def step(self, whole: OptimizerStep, group: dict[str, Any], position: int) -> None:
        """Step the parameter with the state that has come.

        Raises:
            RuntimeError: the gradient was changed in place since ``optimizer.step``.
        """
        assert self._values.grad is not None
        self._snapshot.check(self._values.grad)
        self.stage = Stage.STEPPING
        whole.states[self.parameter] = self._there
        if self._has_master:
            self._step_master(whole, group, position)
        else:
            whole.advance(group, [(position, self.parameter)])
        whole.background.finish()
        if self._layer is not None:
            self._layer.held_sketch = None
        self.stage = Stage.STEPPED

    def down(self, link: Link) -> None:
        """Bring the state back. It may have other tensors than before: a selection replaces them."""
        mark, state = link.mark(), dict(self._there)
        for key in _travelling(self._there, self._staying):
            came, held = self._there[key], self._state.get(key)
            if held is None or not same_layout(held, came):
                held = self._storage.empty_like(came)
            link.down(came, held, mark)
            state[key] = held
        self._state.clear()
        self._state.update(state)
        self.stage, self._there, self._values.grad = Stage.ARRIVED, {}, None

    def rescue(self, link: Link) -> None:
        """After a fault, bring a state back that the device has stepped."""
        if self.stage is Stage.STEPPED:
            self.down(link)

    def _step_master(self, whole: OptimizerStep, group: dict[str, Any], position: int) -> None:
        self.parameter.data = master = self._there.pop("master")
        assert self._values.grad is not None
        whole.advance_master(group, position, self.parameter, self._values.grad, self._values.data)
        self._there["master"] = master


def state_bytes(state: State) -> int:
    """Bytes of a state that travel, each way."""
    return sum(state[key].nbytes for key in _travelling(state, HOST_KEYS))


def _travelling(state: State, staying: frozenset[str]) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, Tensor) and key not in staying]
