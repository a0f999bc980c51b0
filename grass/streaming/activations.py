"""The inputs of units between forward and backward: in host memory, where the device has no room for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from grass.machine.link import Link
from grass.offload.executor import Executor
from grass.offload.host_storage import host_like
from grass.offload.tasks import Task


class HostActivations:
    """Keeps activations on the host. They come back in the reverse order, one ahead.

    Args:
        link: to the device.
        executor: runs the copies.
    """

    def __init__(self, link: Link, executor: Executor) -> None:
        self._link, self._executor = link, executor
        self._last: Before = _none

    def keep(self, tensor: Tensor) -> HostActivation:
        """Begin to bring a tensor to the host; it must not change."""
        activation = HostActivation(tensor, self._last, self._link, self._executor)
        self._last = weakref.ref(activation)
        return activation


class HostActivation:
    """One tensor on its way to the host and back.

    Args:
        tensor: on the device.
        before: returns the activation of the unit before, which is needed next in backward.
        link: to the device.
        executor: runs the copies.
    """

    def __init__(self, tensor: Tensor, before: Before, link: Link, executor: Executor) -> None:
        self._link, self._executor, self._before = link, executor, before
        self._requires_grad, self._device = tensor.requires_grad, tensor.device
        self._shape, self._dtype = tensor.shape, tensor.dtype
        values = tensor.detach()
        if not values.is_contiguous():
            values = values.contiguous()
        mark = link.mark()

        def work() -> None:
            self._host = host_like(values)
            link.down(values, self._host, mark)

        self._down = Task("activation", "down", values.nbytes, work=work)
        self._up: Task | None = None
        self._there: Tensor | None = None
        executor.submit([self._down])

    def get(self) -> Tensor:
        """The tensor, on the device again; a leaf of its own. The one before begins to come back too."""
        self.begin()
        there, up = self._there, self._up
        assert there is not None and up is not None  # noqa: PT018
        self._executor.wait(up)
        self._there = self._up = None  # another backward brings it again
        if (before := self._before()) is not None:
            before.begin()
        return there.requires_grad_(self._requires_grad)

    def begin(self) -> None:
        """Begin to bring it back."""
        if self._up is not None:
            return
        with torch.inference_mode(False):
            self._there = there = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        mark = self._link.mark()
        self._up = Task("activation", "up", there.nbytes, (self._down,), lambda: self._link.up(self._host, there, mark))
        self._executor.submit([self._up])


Before = Callable[[], HostActivation | None]


def _none() -> None: ...
