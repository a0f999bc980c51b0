"""The state of a stratum, saved as that of the whole weight.

A state dict has the selected columns of all strata, counted from the weight's first column, with their moments as
``DTensor``. So it is the state of an ordinary converted layer with ``r`` selected columns: one process loads it, and
so does a grid of another shape. There, a stratum keeps the columns of its own, and draws what it lacks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from grass.distributed.parallel_2d.mesh import WEIGHT, Grid, arrived
from grass.parallel.shards import local
from grass.state.schema import MOMENTS, State

COLUMNS = (Shard(0), Replicate())
"""A vector over the columns of all strata."""
OF_COLUMNS = ("indices", "row_steps", "bank_steps")
OF_BLOCKS = (*MOMENTS, "bank_exp_avg", "bank_exp_avg_sq", "active")


def saved_state(state: State, active: Tensor | None, grid: Grid, shape: tuple[int, int]) -> State:
    """The state of the whole weight.

    Args:
        state: of this rank's stratum.
        active: values of its selected columns that the weight cannot hold.
        grid: the ranks.
        shape: ``(m, n / a)``.
    """
    saved = {**state, "indices": state["indices"] + grid.row * shape[1], "explored": state["explored"] * grid.rows}
    if active is not None:
        saved["active"] = active
    for names, placements in ((OF_COLUMNS, COLUMNS), (OF_BLOCKS, WEIGHT)):
        for name in names:
            if name in saved:
                saved[name] = grid.own(saved[name].contiguous(), placements)
    return saved


def held_state(saved: State, grid: Grid, shape: tuple[int, int]) -> State:
    """The state of this rank's stratum; the inverse of :func:`saved_state`."""
    state = {**saved, "explored": int(saved["explored"]) // grid.rows}
    for names, placements in ((OF_COLUMNS, COLUMNS), (OF_BLOCKS, WEIGHT)):
        for name in names:
            if name in saved:
                state[name] = _own_part(saved[name], grid, placements)
    first = grid.row * shape[1]
    state["indices"] = state["indices"] - first
    outside = ((state["indices"] < 0) | (state["indices"] >= shape[1])).any().long().reshape(1)
    if int(arrived(grid.gather_column(outside)).sum()):
        return _fitted(state, grid, shape)
    return state


def _own_part(value: Tensor, grid: Grid, placements: Any) -> Tensor:
    """This rank's part of a ``DTensor`` or of a tensor that every rank has."""
    if isinstance(value, DTensor):
        return local(value.redistribute(placements=placements))
    return local(grid.shard(value, placements))


def _fitted(state: State, grid: Grid, shape: tuple[int, int]) -> State:
    """The state of a stratum where saved columns are not evenly spread over the strata.

    A stratum with too many columns keeps the first ones; one with too few takes others, whose moments are zero.
    """
    if "bank_steps" in state:
        raise ValueError(
            "A bank is not for another number of strata: load it on as many rows of ranks as it was saved on"
        )
    count = len(state["indices"])
    indices = arrived(grid.gather_column(state["indices"] + grid.row * shape[1])).flatten() - grid.row * shape[1]
    mine = ((indices >= 0) & (indices < shape[1])).nonzero().flatten()[:count]
    rests = torch.ones(shape[1], dtype=torch.bool, device=indices.device)
    rests[indices[mine]] = False
    chosen, order = torch.cat([indices[mine], rests.nonzero().flatten()[: count - len(mine)]]).sort()
    fitted = {**state, "indices": chosen}
    if "row_steps" in state:
        every = arrived(grid.gather_column(state["row_steps"])).flatten()
        fitted["row_steps"] = torch.cat([every[mine], every.new_zeros(count - len(mine))])[order]
    for name in MOMENTS:
        blocks = arrived(grid.gather_column(state[name].t())).flatten(0, 1)
        values = torch.cat([blocks[mine], blocks.new_zeros(count - len(mine), blocks.shape[1])])[order]
        fitted[name] = values.t()
    fitted.pop("active", None)
    return fitted
