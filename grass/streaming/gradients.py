"""The way of gradients from the device to the parameters on the host, during backward."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grass.kernels.layout import is_dense
from grass.machine.link import Link
from grass.offload.executor import Executor
from grass.offload.host_storage import host_like
from grass.offload.tasks import Task
from grass.private_names import at_end_of_backward, check_accumulates, gradient_hooks, running_backward


class HostGradients:
    """Brings gradients down in a thread of its own. The thread that runs backward adds them to those of the parameters.

    When ``backward()`` returns, all are added. Where it fails, those on their way are dropped: none comes after
    ``zero_grad()``.

    Args:
        link: to the device.
        executor: runs the copies.
    """

    def __init__(self, link: Link, executor: Executor) -> None:
        self._link, self._executor = link, executor
        self._passes: dict[int, list[list[_OnItsWay]]] = {}  # of each backward pass that runs, by units

    def begin_unit(self) -> None:
        """Note that backward comes to another unit: gradients of one unit before it may still be on their way."""
        units = self._units()
        while len(units) > 1:
            self._add(units[0])
            del units[0]
        units.append([])

    def arrive(self, parameter: Tensor, there: Tensor) -> Tensor:
        """``there`` as a function of a parameter on the host: its gradient goes to the parameter.

        Args:
            parameter: a leaf on the host that wants a gradient.
            there: on the device; of the parameter's shape and dtype.
        """
        visiting: Tensor = _Arrive.apply(parameter, there, self)  # type: ignore[no-untyped-call]
        return visiting

    def send(self, parameter: Tensor, grad: Tensor) -> None:
        """Queue the copy of a gradient. Called in backward."""
        grad = _laid_out(grad.detach(), parameter)
        mark = self._link.mark()
        arrived: list[Tensor] = []

        def work() -> None:
            own = host_like(grad)
            self._link.down(grad, own, mark)
            arrived.append(own)

        task = Task("gradient", "down", grad.nbytes, work=work)
        self._executor.submit([task])
        self._units()[-1].append((task, parameter, arrived))

    def _units(self) -> list[list[_OnItsWay]]:
        """Gradients of the backward pass that runs, by units.

        Autograd drops a callback of a pass that fails, which forgets them. That may be after the error has reached the
        caller.
        """
        running = running_backward()
        if running not in self._passes:
            self._passes[running] = [[]]
            last = partial(self._finish, running)
            weakref.finalize(last, self._passes.pop, running, None).atexit = False
            at_end_of_backward(last)
        return self._passes[running]

    def _finish(self, running: int) -> None:
        for unit in self._passes[running]:
            self._add(unit)

    @torch.no_grad()
    def _add(self, unit: list[_OnItsWay]) -> None:
        """Wait for gradients and add them, each once, also if this is interrupted."""
        while unit:
            task, parameter, arrived = unit[0]
            self._executor.wait(task)
            del unit[0]
            if parameter.grad is None:
                parameter.grad = arrived[0]
            else:
                parameter.grad.add_(arrived[0])


_OnItsWay = tuple[Task, Tensor, list[Tensor]]
"""The copy of a gradient, the parameter that it belongs to, and what has arrived."""


class _Arrive(torch.autograd.Function):
    """A parameter's values on the device; backward sends the gradient to the host."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, there: Tensor, gradients: HostGradients) -> Tensor:
        """The values on the device."""
        ctx.parameter, ctx.gradients = parameter, gradients
        return there.view_as(there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """Send the gradient. Autograd gets it only where more than ``parameter.grad`` depends on it."""
        if _is_for_autograd(ctx):
            return grad.to(ctx.parameter.device), None, None
        ctx.gradients.send(ctx.parameter, grad)
        return None, None, None


def _laid_out(grad: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the strides that autograd would give it: the parameter's, if that is dense."""
    like = parameter if is_dense(parameter) else torch.empty(parameter.shape, device="meta")
    if grad.stride() == like.stride():
        return grad
    return torch.empty_strided(grad.shape, like.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


def _is_for_autograd(ctx: Any) -> bool:
    """Whether the parameter has hooks, or the gradient is for ``create_graph=True`` or ``torch.autograd.grad``."""
    parameter = ctx.parameter
    if gradient_hooks(parameter) or torch.is_grad_enabled():
        return True
    ((accumulate, _), *_) = ctx.next_functions
    try:
        check_accumulates(accumulate)
    except RuntimeError:  # torch raises it for leaves that torch.autograd.grad was asked for
        return True
    return False
