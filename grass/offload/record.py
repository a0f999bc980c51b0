"""What the host optimizer knows of one parameter, in a step and between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from grass.offload.device_step import DeviceStep
from grass.offload.host_copies import HostCopy


@dataclass(eq=False)
class Record:
    """One parameter.

    Attributes:
        parameter: on the device, unless it is marked.
        name: what errors call it.
        group: its parameter group.
        position: its place among all parameters.
        by: what stepped it last: its copy on the host, or the device.
        stamp: of the parameter after the device has stepped it; ``None`` if the host has.
        stored: the tensors of its state that lie in :class:`HostStorage`, by key.
        elements: values that are stepped.
        down: bytes of the gradient.
        up: bytes of the values that come up.
        state: bytes of the state if the device steps, each way.
        lost: what a failed step has destroyed: state that was left half changed, or stepped values that cannot be
            brought to the device.
    """

    parameter: Tensor
    name: str
    group: dict[str, Any]
    position: int
    by: HostCopy | DeviceStep | None = None
    stamp: tuple[int, int] | None = None
    stored: dict[str, Tensor] = field(default_factory=dict)
    elements: int = field(init=False)
    down: int = field(init=False)
    up: int = field(init=False)
    state: int = 0
    lost: Literal["state", "values"] | None = None

    def __post_init__(self) -> None:
        self.elements = self.parameter.numel()
        self.down = self.up = self.parameter.nbytes

    @property
    def copy(self) -> HostCopy | None:
        """The copy on the host, if that is what was stepped."""
        return self.by if isinstance(self.by, HostCopy) else None

    def forget(self) -> None:
        """Make the next step read the parameter anew."""
        self.by = self.stamp = None
