"""Tensor versions, by which autograd refuses the graph of a forward whose weights have been stepped since.

PyTorch counts what its operators write. Kernels write past it, and FSDP2 computes with whole copies of its shards,
which no operator of a step touches. Backward through such a graph would use some weights from before the step and some
from after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import is_available

from grass.parallel.shards import is_sharded, local


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Count a write of each tensor: of a ``DTensor`` also of this rank's part, and of the whole that FSDP2 makes."""
    written = list(tensors)
    if sharded := [t for t in written if is_sharded(t)]:
        written += [local(t.detach()) for t in sharded]
        written += _wholes({id(t) for t in sharded})
    increment_version(written)


def _wholes(sharded: set[int]) -> Iterator[Tensor]:
    """What modules under FSDP2 compute with in place of these parameters, as far as they have computed."""
    if not is_available():
        return
    from torch.distributed._composable_state import _module_state_mapping

    states: list[Any] = [reference() for reference in list(_module_state_mapping.values())]
    for state in states:
        for group in getattr(state, "_fsdp_param_groups", ()):
            for parameter in group.fsdp_params:
                if id(parameter.sharded_param) in sharded and hasattr(parameter, "_unsharded_param"):
                    yield parameter._unsharded_param
