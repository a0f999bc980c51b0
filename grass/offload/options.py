"""What ``GrassAdamW(offload=...)`` takes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grass.machine.numa import check_node
from grass.state.master import is_half


@dataclass(frozen=True)
class Offload:
    """How the optimizer's state is kept and stepped on the host.

    Attributes:
        fraction: share of the parameters' elements that the device steps, while the host steps the others: their state
            goes to the device and back (:mod:`grass.offload.device_step`). ``"auto"`` measures the first steps and
            takes the share that a simulation finds fastest.
        threads: threads of the CPU kernel; ``None``: as many as the NUMA node of the device has physical cores
            (:func:`grass.machine.numa.host_threads`), for a CPU as the device as many as torch uses. Results depend
            on their number as those of the resident optimizer do. Parameters at full rank are stepped by torch, with
            torch's threads.
        numa: the NUMA node that the host's update is bound to, on Linux. ``"auto"``: that of the device of the first
            parameter, if the machine has several nodes. ``None``: not bound.
        path: a directory: moments, bank and the copies of the weights lie in memory-mapped files there, which may be
            larger than the host's memory. ``None``: in memory.
        masters: keep float32 copies of bfloat16 and float16 parameters on the host, step these, and round them into the
            parameters (:mod:`grass.offload.host_copies`). Moments are float32 as well. Active rows of converted layers
            have masters by ``grass.compact(dtype=torch.float32)``. ``False`` steps parameters as the resident optimizer
            does, which has masters of small ones only (:mod:`grass.state.master`).
        overlap: return from ``optimizer.step()`` before the host has finished; ``False`` waits.
        deadline: seconds after which a copy or an update that has not ended is an error.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or this process may use no processor of the NUMA node; the message says
            what is allowed.
    """

    fraction: float | str = 0.0
    threads: int | None = None
    numa: int | str | None = "auto"
    path: str | os.PathLike[str] | None = None
    masters: bool = False
    overlap: bool = True
    deadline: float = 600.0
    _bytes_per_second: float | None = field(default=None, repr=False)
    """For benchmarks on a CPU: slows copies down to this rate in each direction, to show what overlaps."""

    def __post_init__(self) -> None:
        for name in ("masters", "overlap"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"Invalid {name}={value!r}: must be True or False")
        if self.fraction != "auto":
            self._check("fraction", "a number in [0, 1] or 'auto'", lambda v: 0 <= v <= 1)
        if self.threads is not None:
            self._check("threads", "an integer >= 1 or None", lambda v: v >= 1, int)
        if self.numa is not None and self.numa != "auto":
            self._check("numa", "an integer >= 0, 'auto' or None", lambda v: v >= 0, int)
            check_node(int(self.numa))
        if self.path is not None and not isinstance(self.path, (str, os.PathLike)):
            raise TypeError(f"Invalid path={self.path!r}: must be a path or None")
        if self.path is not None and not os.fspath(self.path):
            raise ValueError(f"Invalid path={self.path!r}: must name a directory")
        self._check("deadline", "a finite number > 0", lambda v: 0 < v < math.inf)
        if self._bytes_per_second is not None:
            self._check("_bytes_per_second", "a finite number > 0 or None", lambda v: 0 < v < math.inf)

    def _check(self, name: str, words: str, holds: Callable[[Any], bool], *types: type) -> None:
        value = getattr(self, name)
        message = f"Invalid {name}={value!r}: must be {words}"
        if isinstance(value, bool) or not isinstance(value, types or (int, float)):
            raise TypeError(message)
        if not holds(value):
            raise ValueError(message)

    def has_master(self, parameter: Tensor) -> bool:
        """Whether the host steps a float32 master in place of a parameter that is not active rows."""
        return self.masters and is_half(parameter.dtype)

    def check_sharded(self, parameter: Any) -> None:
        """Check that a ``DTensor`` can be offloaded: its state stays on the host, and the parameter is on the device.

        Raises:
            ValueError: it cannot.
        """
        if parameter.device.type != parameter.device_mesh.device_type:
            raise ValueError(
                "FSDP2's CPUOffloadPolicy keeps the parameters on the host already: leave it or offload out"
            )
        if (fraction := self.fraction) not in (0, "auto"):
            raise ValueError(
                f"Invalid {fraction=} for sharded parameters: must be 0, which leaves their state on the host"
            )

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
