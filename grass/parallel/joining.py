"""``DDP.join()``: a rank whose data has ended stands in for DDP's collectives, and for no others."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Wrappers:
    """The ``DistributedDataParallel`` modules around some parameters, which do not lead to their wrappers."""

    def __init__(self, wrappers: list[Any]) -> None:
        self._wrappers = [weakref.ref(wrapper) for wrapper in wrappers]

    @classmethod
    def of(cls, parameters: list[Tensor]) -> Wrappers:
        """Those that are alive: the search looks at every object of the process once."""
        ours = {id(p) for p in parameters}
        if not ours:
            return cls([])
        every = [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]
        return cls([ddp for ddp in every if any(id(p) in ours for p in ddp.parameters())])

    def check(self) -> None:
        """Raise ``RuntimeError`` if one of them is in ``join()``."""
        for reference in self._wrappers:
            ddp = reference()
            if ddp is not None and ddp._join_config.enable:
                raise RuntimeError(
                    "Grass cannot train inside DDP.join(): a rank whose batches have ended leaves out "
                    "optimizer.step(), in which the ranks communicate. Give every rank the same number of batches, "
                    "for example by DistributedSampler, and leave join() out or pass join(enable=False)"
                )
