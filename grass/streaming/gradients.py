"""The way of gradients from the device to the parameters on the host, during backward."""

from __future__ import annotations

import weakref
from contextlib import suppress
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
    """Brings gradients down and adds them to those of the parameters, in a thread of its own.

    When ``backward()`` returns, all have arrived.

    Args:
        link: to the device.
        executor: runs the copies.
    """

    def __init__(self, link: Link, executor: Executor) -> None:
        self._link, self._executor = link, executor
        self._going: list[Task] = []
        self._before, self._backward = 0, -1

    def begin_unit(self) -> None:
        """Note that backward comes to another unit: gradients of one unit before it may still be on their way."""
        self._wait(self._before)
        self._before = len(self._going)

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
        self._settle_after(running_backward())
        grad = _laid_out(grad.detach(), parameter)
        mark = self._link.mark()

        def work() -> None:
            own = host_like(grad)
            self._link.down(grad, own, mark)
            if parameter.grad is None:
                parameter.grad = own
            else:
                parameter.grad.add_(own)

        task = Task("gradient", "down", grad.nbytes, work=work)
        self._going.append(task)
        self._executor.submit([task])

    def _settle_after(self, backward: int) -> None:
        """Wait for all gradients when a backward has ended, and also where it fails: none comes after ``zero_grad()``.

        Autograd drops a callback of a backward that fails, if nothing else holds it: the frames of an error's traceback
        must not.
        """
        if backward != self._backward:
            self._backward = backward
            last = partial(self.finish)
            weakref.finalize(last, self._settle).atexit = False
            at_end_of_backward(last)

    def finish(self) -> None:
        """Wait until all gradients are on the host."""
        self._wait(len(self._going))
        self._before = 0

    def _wait(self, count: int) -> None:
        """Wait for the first gradients. If this is interrupted, they are waited for again."""
        for task in self._going[:count]:
            if self._executor.has(task):  # otherwise an interrupt came before it was submitted
                self._executor.wait(task)
        del self._going[:count]

    def _settle(self) -> None:
        with suppress(RuntimeError):  # the next use of the executor raises it
            self.finish()


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
