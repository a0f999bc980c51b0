"""The ``DistributedDataParallel`` modules around some parameters, which do not lead to their wrappers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from grass.private_names import is_joining, parameters_of_ddp


def wrappers_of(parameters: Iterable[Tensor]) -> list[Any]:
    """All DDP wrappers alive that reduce gradients of these parameters; looks at every object of the process."""
    ours = {id(p) for p in parameters}
    every: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]
    return [ddp for ddp in every if any(id(p) in ours for p in parameters_of_ddp(ddp))]


def are_wrapped(parameters: list[Tensor]) -> bool:
    """Whether a DDP wrapper in use reduces gradients of these parameters; one may only wait for its collection."""
    if not (parameters and distributed.is_available() and distributed.is_initialized() and wrappers_of(parameters)):
        return False
    gc.collect()
    return bool(wrappers_of(parameters))


class Joining:
    """Refuses ``DDP.join()``, in which a rank without batches stands in for DDP's collectives, and for no others."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._wrappers = [weakref.ref(ddp) for ddp in wrappers_of(parameters)] if parameters else []

    def check(self) -> None:
        """Raise ``RuntimeError`` if one of them is in ``join()``."""
        for reference in self._wrappers:
            ddp = reference()
            if ddp is not None and is_joining(ddp):
                raise RuntimeError(
                    "Grass cannot train inside DDP.join(): a rank whose batches have ended leaves out "
                    "optimizer.step(), in which the ranks communicate. Give every rank the same number of batches, "
                    "for example by DistributedSampler, and leave join() out or pass join(enable=False)"
                )
