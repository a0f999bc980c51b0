"""What ranks of a grid receive and save, counted."""

from __future__ import annotations

import runpy
from math import isqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import grass
from grass.distributed.parallel_2d.mesh import Grid
from grass.parallel.shards import local
from tests.distributed.world import run_world

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "bench" / "grid_costs.py"))
SIZES = SCRIPT["Sizes"](tokens=144, hidden=144, wide=288)


def elements(rank: int, ranks: int) -> dict[str, dict[str, float]]:
    """Elements that this rank receives in the third step, by scheme and collective."""
    return {scheme: SCRIPT["third_step"](scheme, ranks, SIZES) for scheme in SCRIPT["SCHEMES"]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, pytest.param(9, marks=pytest.mark.soak)])
def test_ranks_receive_what_the_formulas_say(ranks: int) -> None:
    share = SCRIPT["SHARE"]
    for by_collective in run_world(elements, ranks, ranks):
        for scheme, counted in by_collective.items():
            assert counted == pytest.approx(SCRIPT["received_by"](scheme, ranks, SIZES), rel=0, abs=1e-6)
        received = {scheme: sum(counted.values()) for scheme, counted in by_collective.items()}
        assert received["2D, Grass"] <= ((2 + share) / 3 + 0.02) * received["2D"]
        assert received["2D, Grass, cached panels"] < received["2D, Grass"]


def saved_bytes(model: Any, x: Tensor) -> int:
    """Bytes that backward keeps, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in map(local, model.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    return sum(kept.values())


def saved_on_a_grid(rank: int, ranks: int) -> tuple[int, int]:
    """Whole gradients, and compact ones."""
    q = isqrt(ranks)
    mesh = init_device_mesh("cpu", (q, q), mesh_dim_names=("rows", "columns"))
    model = SCRIPT["chain"](SIZES)
    SCRIPT["spread"](model, Grid(mesh))
    x = torch.randn(SIZES.tokens // q, SIZES.hidden // q, dtype=torch.float64)
    whole = saved_bytes(model, x)
    grass.compact(model, rank=1 / 8)
    return whole, saved_bytes(model, x)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 9])
def test_ranks_save_their_share_of_activations(ranks: int) -> None:
    model, x = SCRIPT["chain"](SIZES), torch.randn(SIZES.tokens, SIZES.hidden, dtype=torch.float64)
    whole = saved_bytes(model, x)
    grass.compact(model, rank=1 / 8)
    compact = saved_bytes(model, x)
    assert whole == 8 * SIZES.tokens * (SIZES.hidden + SIZES.wide)
    assert compact == whole // 4
    for own in run_world(saved_on_a_grid, ranks, ranks):
        assert own == (whole // ranks, compact // ranks)
