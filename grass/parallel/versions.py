"""Tensor versions, by which autograd refuses the graph of a forward whose weights have been stepped since.

PyTorch counts what its operators write. Kernels write past it, and FSDP2 computes with whole copies of its shards,
which no operator of a step touches. Backward through such a graph would use some weights from before the step and some
from after it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import increment_version

from grass.parallel.shards import is_sharded, local
from grass.private_names import gathered_by_fsdp


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Count a write of each tensor: of a ``DTensor`` also of this rank's part, and of the whole that FSDP2 makes."""
    written = list(tensors)
    if sharded := [t for t in written if is_sharded(t)]:
        written += [local(t.detach()) for t in sharded]
        whole = gathered_by_fsdp()
        written += [whole[id(t)] for t in sharded if id(t) in whole]
    increment_version(written)
