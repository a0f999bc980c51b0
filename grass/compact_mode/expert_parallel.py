r"""Experts that ``p`` ranks divide: expert parallelism.

A weight ``(E, m, n)`` is a ``DTensor`` placed as ``Shard(0)``, as ``distribute_tensor(weight, mesh, [Shard(0)])`` in a
``ParallelStyle`` places it. Each rank has ``E / p`` experts, and its module of experts computes with tokens of these
only, which all ranks have sent to it. So gradients of active rows are complete where they are computed, and no rank
sends any.

The experts of a rank are a stratum: of each, the rank selects ``r`` rows and explores ``q`` by draws of its own. Active
rows are a ``DTensor`` divided along the selected dimension. All ranks refresh in the same steps: an expert without
tokens keeps its rows then, also where no expert of its rank has tokens.

``fully_shard`` may follow over another dimension of the mesh, which divides each expert.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Placement, Shard

from grass.compact_mode.divided import DividedLayer
from grass.compact_mode.experts import ExpertRows
from grass.parallel.shards import shard_dim

EXPERT_PARALLELISM = "expert parallelism"
"""What divides these layers, in messages."""


class ExpertParallelRows(DividedLayer, ExpertRows):
    """The active rows of one weight of divided experts; ``experts`` and ``shape`` are those of this rank."""

    divided_by = EXPERT_PARALLELISM
    sums_sketch = True

    def row_placement(self) -> Placement:
        """Each rank has the rows of its experts."""
        return Shard(self.dim)

    def keep(self, weight: Tensor) -> None:
        """As :meth:`ExpertRows.keep`, of the experts of this rank."""
        self.weight.data = self._placed(weight.contiguous())

    def end_sketch(self) -> Tensor:
        """As :meth:`CompactLayer.end_sketch`, summed over the ranks that have tokens of their own for these experts."""
        own, mesh = super().end_sketch(), self.weight.device_mesh
        for dim in range(mesh.ndim - 1):
            dist.all_reduce(own, group=mesh.get_group(dim))
        return own


def check_divided(model: nn.Module, name: str, weight: Any) -> None:
    """Refuse a weight of experts, named in a model, that ranks divide otherwise than into equally many experts each.

    Raises:
        ValueError: it is not placed as ``Shard(0)`` over one dimension of a mesh, or not evenly.
        RuntimeError: ``fully_shard`` has sharded it.
    """
    parts = name.split(".")[:-1]
    around = [model, *(model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))]
    if any(isinstance(module, FSDPModule) for module in around):
        raise RuntimeError(
            f"Too late to convert {name!r}: its weight is sharded, as {weight.placements}. Call grass.compact() before "
            "fully_shard, and after the experts were divided by expert parallelism"
        )
    placements, sizes = weight.placements, tuple(weight.device_mesh.shape)
    if len(sizes) > 1 or shard_dim(placements[0]) != 0:
        raise ValueError(
            f"The weight of {name!r} is placed as {placements} over a mesh of {sizes}: compact mode takes plain "
            "tensors, or experts divided by Shard(0) over one dimension of a mesh; leave it out by exclude="
        )
    if weight.shape[0] % sizes[0]:
        raise ValueError(
            f"{sizes[0]} ranks do not share the {weight.shape[0]} experts of {name!r} evenly: compact mode needs a "
            f"multiple of {sizes[0]}; leave it out by exclude="
        )
