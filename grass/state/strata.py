"""Strata: parts of a weight that ranks divide along the selected dimension. Each rank selects rows of its own.

A state dict has the selected rows (``dim=1``: columns) of all strata, counted from the weight's first row, with their
moments as ``DTensor``. So it is the state of an ordinary converted layer with ``r`` selected rows: one process loads
it, and so do ranks with another number of strata. There, a stratum keeps the rows of its own, and draws what it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from grass.parallel.shards import is_sharded, local, own_part, shard_dim
from grass.state.schema import MOMENTS, State

STRATUM_KEY = 1 << 24
"""What the key of random draws grows by from one stratum to the next: more than there are parameters."""

OF_ROWS = ("indices", "row_steps", "bank_steps")
OF_BLOCKS = (*MOMENTS, "bank_exp_avg", "bank_exp_avg_sq", "active")


@dataclass(frozen=True)
class Strata:
    """How ranks divide the selected dimension of a weight.

    Attributes:
        mesh: all ranks that divide the weight.
        over: the dimension of the mesh along which the strata lie.
        placements: of the weight.
        dim: the selected dimension.
        shape: of this rank's stratum: ``(m / a, n)`` for ``dim=0``, ``(m, n / a)`` for ``dim=1``.
    """

    mesh: Any
    over: int
    placements: tuple[Any, ...]
    dim: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor, dim: int) -> Strata | None:
        """Those of a ``DTensor`` ``(m, n)``, which one dimension of its mesh divides along ``dim``; else ``None``.

        Raises:
            ValueError: the ranks have parts of different sizes.
        """
        if weight.ndim != 2 or not is_sharded(weight):
            return None
        mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
        if mesh.ndim > 1 and mesh.mesh_dim_names is None:
            return None
        over = [i for i, size in enumerate(mesh.shape) if size > 1 and shard_dim(placements[i]) == dim]
        if len(over) != 1:
            return None
        shape, count = list(weight.shape), int(mesh.shape[over[0]])
        if shape[dim] % count:
            raise ValueError(
                f"A weight of shape {tuple(shape)} is divided along the selected dimension {dim} among {count} ranks, "
                "which must have equal parts: choose another size, or the other dim= if the ranks do not divide that"
            )
        shape[dim] //= count
        return cls(mesh, over[0], tuple(placements), dim, (shape[0], shape[1]))

    @property
    def count(self) -> int:
        """``a``, the number of strata."""
        return int(self.mesh.shape[self.over])

    @property
    def number(self) -> int:
        """Which of them is this rank's."""
        return int(self.mesh.get_local_rank(self.over))

    @property
    def first(self) -> int:
        """The first row of this rank's stratum."""
        return self.number * self.shape[self.dim]

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's stratum of the weight or its gradient, sharded over the other dimensions of the mesh."""
        return own_part(tensor, self.over)

    def any(self, own: bool, device: torch.device) -> bool:
        """Whether it is true of any stratum."""
        found = torch.tensor(float(own), device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.mesh.get_group(self.over))
        return bool(found)

    def saved_state(self, state: State, active: Tensor | None = None) -> State:
        """The state of the whole weight.

        Args:
            state: of this rank's stratum.
            active: values of its selected rows that the weight cannot hold.
        """
        saved = {**state, "indices": state["indices"] + self.first}
        if "explored" in state:
            saved["explored"] = state["explored"] * self.count
        if active is not None:
            saved["active"] = active
        for name, placements in self._placed(saved):
            saved[name] = self._whole(saved[name].contiguous(), placements)
        return saved

    def held_state(self, saved: State) -> State:
        """The state of this rank's stratum; the inverse of :meth:`saved_state`."""
        state = dict(saved)
        if "explored" in saved:
            state["explored"] = int(saved["explored"]) // self.count
        for name, placements in self._placed(saved):
            state[name] = self._own_part(saved[name], placements)
        state["indices"] = state["indices"] - self.first
        outside = ((state["indices"] < 0) | (state["indices"] >= self.shape[self.dim])).any().long().reshape(1)
        return self._fitted(state) if int(self._gathered(outside).sum()) else state

    def _placed(self, state: State) -> list[tuple[str, tuple[Any, ...]]]:
        """The names of tensors that the ranks divide, with their placements."""
        of_rows = tuple(Shard(0) if i == self.over else Replicate() for i in range(self.mesh.ndim))
        every = [(name, of_rows) for name in OF_ROWS] + [(name, self.placements) for name in OF_BLOCKS]
        return [(name, placements) for name, placements in every if name in state]

    def _whole(self, part: Tensor, placements: tuple[Any, ...]) -> Tensor:
        """The ``DTensor`` that has ``part`` as this rank's part."""
        sizes = list(part.shape)
        if part.ndim == 2:
            sizes[1 - self.dim] = self.shape[1 - self.dim]
        sizes[self.dim if part.ndim == 2 else 0] *= self.count
        whole: dict[str, Any] = {"shape": torch.Size(sizes), "stride": torch.empty(sizes, device="meta").stride()}
        return DTensor.from_local(part, self.mesh, placements, run_check=False, **whole)

    def _own_part(self, value: Tensor, placements: tuple[Any, ...]) -> Tensor:
        """This rank's part of a ``DTensor`` or of a tensor that every rank has."""
        if isinstance(value, DTensor):
            return local(value.redistribute(placements=placements))
        return local(distribute_tensor(value, self.mesh, placements, src_data_rank=None))

    def _gathered(self, own: Tensor) -> Tensor:
        """The vectors or rows of all strata, one after another."""
        every = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(every, own.contiguous(), group=self.mesh.get_group(self.over))
        return torch.cat(every)

    def _fitted(self, state: State) -> State:
        """The state of a stratum where saved rows are not evenly spread over the strata.

        A stratum with too many rows keeps the first ones; one with too few takes others, whose moments are zero.
        """
        if "bank_steps" in state:
            raise ValueError(
                "A bank is not for another number of strata: load it on as many of them as it was saved on"
            )
        count, size = len(state["indices"]), self.shape[self.dim]
        indices = self._gathered(state["indices"] + self.first) - self.first
        mine = ((indices >= 0) & (indices < size)).nonzero().flatten()[:count]
        rests = torch.ones(size, dtype=torch.bool, device=indices.device)
        rests[indices[mine]] = False
        chosen, order = torch.cat([indices[mine], rests.nonzero().flatten()[: count - len(mine)]]).sort()
        fitted = {**state, "indices": chosen}
        for name in ("row_steps", *MOMENTS):
            if name in state:
                value = state[name].movedim(self.dim, 0) if name in MOMENTS else state[name]
                every = self._gathered(value.contiguous())
                kept = torch.cat([every[mine], every.new_zeros(count - len(mine), *every.shape[1:])])[order]
                fitted[name] = kept.movedim(0, self.dim) if name in MOMENTS else kept
        fitted.pop("active", None)
        return fitted
