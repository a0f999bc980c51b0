"""A step on its way: how far each parameter has come, and whether something has changed it or its gradient since."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from grass.kernels.layout import is_dense
from grass.machine.link import Link
from grass.parallel.shards import local

SAMPLED = 64
"""Values of a gradient that are compared."""


class Stage(Enum):
    """How far a parameter has come in a step. Each is noted when the work before it has ended."""

    QUEUED = "nothing has changed"
    STEPPING = "the host changes its state"
    STEPPED = "the host has its new values"
    GIVEN = "the new values have come up"
    ARRIVING = "they take their place"
    ARRIVED = "the step has ended"


class Changed(RuntimeError):
    """A parameter was changed while its step was on its way."""


class GradientSnapshot:
    """What a gradient was.

    A change in place is seen by the gradient's version. One through ``.data`` has no version: it is seen by values of
    the gradient, :data:`SAMPLED` of them, evenly spread. One that leaves all of these as they were is not seen.

    Args:
        parameter: whose gradient it is.
        grad: the gradient, or this rank's part of it.
    """

    def __init__(self, parameter: Tensor, grad: Tensor) -> None:
        self._grad, self._version, self._shape = grad, grad._version, tuple(parameter.shape)
        self._sample = _sample(grad)

    def check(self, values: Tensor, link: Link | None = None, mark: torch.Event | None = None) -> None:
        """Check that the gradient is still what it was.

        Args:
            values: the gradient, or the copy of it that will be used, with the same strides.
            link: what brings the sample to the host, if ``values`` is a copy there.
            mark: of the work that has made the sample, for the link.

        Raises:
            RuntimeError: something has changed it.
        """
        now, then = _sample(values), self._sample
        if link is not None:
            then = link.peek(then, mark)
        if self._grad._version != self._version or not torch.equal(now.view(torch.uint8), then.view(torch.uint8)):
            raise RuntimeError(
                f"The gradient of a parameter of shape {self._shape} was changed in place before the step had read it: "
                "call zero_grad(set_to_none=True), its default, or optimizer.offload.finish() before"
            )


def stamp_of(parameter: Tensor) -> tuple[int, int]:
    """Differs after any change of a parameter that PyTorch can see."""
    return parameter._version, local(parameter.detach()).data_ptr()


def _sample(grad: Tensor) -> Tensor:
    """A copy of some values, evenly spread over memory."""
    grad = local(grad.detach())
    stride = max(1, grad.numel() // SAMPLED)
    flat = grad.as_strided((grad.numel(),), (1,), grad.storage_offset()) if is_dense(grad) else grad.reshape(-1)
    return flat[::stride].clone()
