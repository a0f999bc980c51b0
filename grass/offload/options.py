"""What ``GrassAdamW(offload=...)`` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Offload:
    """How the optimizer's state is kept and stepped on the host.

    Attributes:
        overlap: return from ``optimizer.step()`` before the host has finished; ``False`` waits.
        deadline: seconds after which a copy or an update that has not ended is an error.
        bytes_per_second: for devices that are the CPU itself: slows copies down to this rate in each direction, so that
            a machine without an accelerator can show what overlaps. ``None``: as fast as it goes.
    """

    overlap: bool = True
    deadline: float = 600.0
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.overlap, bool):
            raise TypeError(f"Invalid overlap={self.overlap!r}: must be True or False")
        for name in ("deadline", "bytes_per_second"):
            value = getattr(self, name)
            if value is None and name == "bytes_per_second":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Invalid {name}={value!r}: must be a number")
            if not 0 < value < math.inf:
                raise ValueError(f"Invalid {name}={value!r}: must be a finite number > 0")

    @staticmethod
    def of(value: Offload | str | None) -> Offload | None:
        """The options that ``offload=`` stands for; ``"cpu"`` means the defaults.

        Raises:
            TypeError: it is neither a string nor :class:`Offload` nor ``None``.
            ValueError: it is another string.
        """
        if value is None or isinstance(value, Offload):
            return value
        if not isinstance(value, str):
            raise TypeError(f"Invalid offload={value!r}: must be 'cpu', a grass.Offload, or None")
        if value != "cpu":
            raise ValueError(f"Invalid offload={value!r}: must be 'cpu', a grass.Offload, or None")
        return Offload()
