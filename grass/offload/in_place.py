"""Parameters that lie on the host while their module computes on a device: the host steps them where they are.

:func:`grass.stream` marks such parameters. Their gradient is on the host when ``step`` is called, and whoever copies
their values to a device waits for the step first, so nothing travels here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.offload.given import Given
from grass.offload.home import Home
from grass.offload.link import Link
from grass.offload.masters import master_of
from grass.offload.replicas import Replica, Stage
from grass.state.schema import State
from grass.stepping.masters import step_master
from grass.stepping.whole import WholeStep

MARK = "_grass_in_place"


class InPlace(Replica):
    """Stands for a marked parameter in a step. The values and the layer are the model's own.

    Args:
        parameter: the marked parameter.
        home: where its master lies.
        layer: the converted layer whose active rows it has.
        state: its state if it has a float32 master there, which is stepped in its place.
    """

    def __init__(self, parameter: Tensor, home: Home, layer: CompactLayer | None, state: State | None = None) -> None:
        own = parameter.detach() if state is None else master_of(parameter, home, state)
        super().__init__(parameter, home, own)
        self.layer, self._state = layer, state

    def begin(self, link: Link, *, decays_all: bool) -> None:
        """Note the gradient and the sketch, where the loop's ``zero_grad()`` cannot drop them."""
        assert self.device.grad is not None
        self._gradient: Tensor | None = self.device.grad
        self._given = Given(self.device, self.device.grad)
        if self.layer is not None and self.layer.sketch is not None:
            self.layer.gathered = self.layer.end_sketch()

    def bytes_down(self) -> int:
        """Nothing travels."""
        return 0

    def bytes_up(self) -> int:
        """Nothing travels."""
        return 0

    def take(self, link: Link) -> None:
        """The gradient is here."""

    def step(self, whole: WholeStep, group: dict[str, Any], position: int) -> None:
        """Step the parameter itself.

        Raises:
            RuntimeError: the gradient was changed in place since ``optimizer.step``.
        """
        grad, self._gradient = self._gradient, None
        assert grad is not None
        self._given.check(grad)
        if self._state is None:
            self.host.grad = grad
            whole.advance(group, [(position, self.host)])
            self.host.grad = None
        else:
            self._state.pop("master", None)
            step_master(whole, group, position, self.host, grad, self.device.detach().data)
            self._state["master"] = self.host.detach()
        whole.background.finish()
        if self.layer is not None:
            self.layer.gathered = None

    def give(self, link: Link) -> None:
        """The values are here."""

    def depart(self) -> None:
        """Nothing is on its way."""
        self.stage = Stage.QUEUED

    def arrive(self) -> None:
        """Note the parameter as it is after the step, unless a cast has moved its values since."""
        if self.stage is not Stage.ARRIVED and (now := self._stamp())[1] == self._version[1]:
            self._version = now
        self.stage = Stage.ARRIVED

    def rescue(self, link: Link) -> None:
        """The values are here."""

    @staticmethod
    def mark(parameter: Tensor) -> None:
        """Say that a parameter lies on the host while its module computes on a device."""
        setattr(parameter, MARK, _Ending())

    @staticmethod
    def unmark(parameter: Tensor) -> None:
        """The opposite of :meth:`mark`."""
        if InPlace.marks(parameter):
            delattr(parameter, MARK)

    @staticmethod
    def marks(parameter: Tensor) -> bool:
        """Whether a parameter is marked."""
        return hasattr(parameter, MARK)

    @staticmethod
    def will_end(parameter: Tensor, wait: Callable[[], object]) -> None:
        """Note how to wait for the step of a parameter that is marked."""
        if InPlace.marks(parameter):
            setattr(parameter, MARK, _Ending(wait))

    @staticmethod
    def wait(parameter: Tensor) -> None:
        """Wait for the step of a marked parameter, from any thread. Raises what the step raised."""
        if (ending := getattr(parameter, MARK, None)) is not None and ending.wait is not None:
            ending.wait()


class _Ending:
    """How to wait for a step. Copies have nothing to wait for."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self.wait = wait

    def __reduce__(self) -> tuple[type[_Ending], tuple[()]]:
        return _Ending, ()
