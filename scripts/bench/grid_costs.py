"""What ranks receive and hold under 1D and 2D tensor parallelism and FSDP2: formulas, checked by counting.

    python scripts/bench/grid_costs.py                # counts on 4 and 9 gloo ranks, a minute

Counted are the elements of every collective of one step, forward and backward, of a chain of linear layers in pairs
``h -> f -> h``. The formulas are those of :func:`received`; ``scripts/diagrams.py`` draws them. A collective over ``g``
ranks is taken as a ring: of an all-gather a rank receives ``g - 1`` parts, of a reduce-scatter likewise, of an
all-reduce both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass
from grass.command_line import ArgumentParser
from grass.distributed.parallel_2d.layers import Linear2D, become
from grass.distributed.parallel_2d.mesh import WEIGHT, Grid

SCHEMES = (
    "1D",
    "FSDP2",
    "FSDP2, Grass",
    "FSDP2 x 1D",
    "2D",
    "2D, Grass",
    "2D, Grass, cached panels",
    "1D, Grass",
    "FSDP2 x 1D, Grass",
    "Replicas x 1D",
    "Replicas x 1D, Grass",
)
SHARE = 1 / 4
"""The share of active columns, selected and explored."""


class Sizes(NamedTuple):
    """What is trained: ``pairs`` of layers ``h -> f -> h`` on ``tokens``, all ranks together."""

    tokens: int
    hidden: int
    wide: int
    pairs: int = 1


def received(scheme: str, ranks: int, sizes: Sizes, share: float = SHARE) -> float:
    """Elements that a rank receives in one step, by all collectives."""
    return sum(received_by(scheme, ranks, sizes, share).values())


def received_by(scheme: str, ranks: int, sizes: Sizes, share: float = SHARE) -> dict[str, float]:
    """Elements that a rank receives in one step, by collective.

    With ``t`` tokens, ``q = sqrt(p)`` and ``rho`` the share of active columns, for each weight ``(m, n)``::

        1D       4 (p - 1) / p t h for a pair       two all-reduces of its activations
        FSDP2    3 (p - 1) / p m n                  two gathers of the weight, one sum of its gradient
        both     4 (q - 1) / q^2 t h for a pair, and 3 (q - 1) / q^2 m n for each weight
        replicas 4 (q - 1) / q^2 t h for a pair, and 2 (q - 1) / q^2 m n for each weight: one all-reduce of its gradient
        2D       3 (q - 1) / q^2 (t n + m n)        two gathers and a sum of inputs and weights, over rows and columns

    With Grass FSDP2 gathers ``(2 + 2 rho) m n`` and sums ``rho m n``, because active columns are gathered too, alone or
    with 1D beside it. Replicas of 1D sum ``2 rho m n``. 1D receives the same: its gradients do not travel. 2D
    gathers ``(1 + rho) t n + 2 m n`` and sums ``t n + rho m n``; with cached panels it gathers ``rho m n`` for ``2 m
    n``. The indices of active columns add gathers of ``(q - 1) rho n / q``, twice with cached panels.
    """
    t, h, f, pairs = sizes
    rho, q = share if "Grass" in scheme else 1.0, isqrt(ranks)
    weights, inputs, columns = 2 * pairs * h * f, pairs * t * (h + f), pairs * (h + f)
    along, over = (q - 1) / q**2, (ranks - 1) / ranks
    gathers = 2 + 2 * rho if "Grass" in scheme else 2
    if scheme.startswith("1D"):
        return {"all-reduce": 4 * over * pairs * t * h}
    if scheme.startswith("Replicas"):
        return {"all-reduce": along * (4 * pairs * t * h + 2 * rho * weights)}
    if scheme.startswith("FSDP2 x 1D"):
        sums = {"all-reduce": 4 * along * pairs * t * h}
        return {**sums, "all-gather": gathers * along * weights, "reduce-scatter": rho * along * weights}
    if scheme.startswith("FSDP2"):
        return {"all-gather": gathers * over * weights, "reduce-scatter": rho * over * weights}
    lists = (q - 1) / q * rho * columns * (2 if "cached" in scheme else int("Grass" in scheme))
    travelling = rho if "cached" in scheme else 2
    return {
        "all-gather": along * ((1 + rho) * inputs + travelling * weights) + lists,
        "reduce-scatter": along * (inputs + rho * weights),
    }


def held(scheme: str, ranks: int, sizes: Sizes, share: float = SHARE) -> dict[str, float]:
    """Elements that a rank holds; gathered are two of ``q`` panels of a layer, or all cached ones."""
    t, h, f, pairs = sizes
    rho, q = share if "Grass" in scheme else 1.0, isqrt(ranks)
    weights, inputs = 2 * pairs * h * f, pairs * t * (h + f)
    base = scheme.split(",")[0]
    blocks = {"FSDP2": h * f, "FSDP2 x 1D": h * f / q, "2D": 2 * (t * max(h, f) + h * f) / q**2}
    gathered = 2 * t * max(h, f) / q**2 + weights / q if "cached" in scheme else blocks.get(base, 0.0)
    beside = pairs * t * (h + f / q) / q
    saved = {"1D": pairs * t * (h + f / ranks), "FSDP2 x 1D": beside, "Replicas x 1D": beside}.get(base, inputs / ranks)
    parts = q if base == "Replicas x 1D" else ranks
    return {
        "weights": weights / parts,
        "gradients_and_moments": 3 * rho * weights / parts,
        "activations": rho * saved,
        "gathered": gathered,
    }


class Received(TorchDispatchMode):
    """Counts, by collective, the elements that this rank receives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operands of collectives."""
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and not func.__name__.startswith(("wait", "_wrap")):
            self._count(func.__name__, args, result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        if "gather" in name:
            output, own = (args[0], args[1]) if name.startswith("_allgather_base") else (result, args[0])
            self._add("all-gather", output.numel() - own.numel())
        elif "reduce_scatter" in name:
            output, whole = (args[0], args[1]) if name.startswith("_reduce_scatter_base") else (result, args[0])
            self._add("reduce-scatter", whole.numel() - output.numel())
        elif "all_reduce" in name or "allreduce" in name:
            if isinstance(args[0], list):
                tensors, group = args[0], dist.ProcessGroup.unbox(args[1])
            else:
                tensors, group = args[:1], torch._C._distributed_c10d._resolve_process_group(args[2])
            size = group.size()
            self._add("all-reduce", 2 * (size - 1) / size * sum(t.numel() for t in tensors))
        else:
            raise RuntimeError(f"An uncounted collective: {name}")

    def _add(self, name: str, count: float) -> None:
        self.elements[name] = self.elements.get(name, 0.0) + count


def chain(sizes: Sizes, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Pairs of layers without biases."""
    layers = [
        nn.Linear(*features, bias=False, dtype=dtype)
        for _ in range(sizes.pairs)
        for features in ((sizes.hidden, sizes.wide), (sizes.wide, sizes.hidden))
    ]
    return nn.Sequential(*layers)


def spread(model: nn.Sequential, grid: Grid) -> None:
    """Make the layers of a chain those of a grid."""
    for layer in model:
        become(layer, Linear2D, grid, weight=WEIGHT)


def built(scheme: str, ranks: int, sizes: Sizes, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """The model under a scheme, and this rank's input."""
    model = chain(sizes, dtype)
    q = isqrt(ranks)
    plan = {str(i): (RowwiseParallel if i % 2 else ColwiseParallel)() for i in range(len(model))}
    if scheme.startswith("1D"):
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
        if "Grass" in scheme:
            grass.compact(model, rank=SHARE / 2)
        return model, _input(sizes, dtype)
    sizes_of = (q, 1, q) if scheme.startswith("Replicas") else (q, q)
    mesh = init_device_mesh("cpu", sizes_of, mesh_dim_names=("rows", "shards", "columns")[:: 4 - len(sizes_of)])
    if not scheme.startswith("2D"):
        options: dict[str, Any] = {}
        if "1D" in scheme:
            parallelize_module(model, mesh["columns"], plan)
            options["mesh"] = mesh[mesh.mesh_dim_names[:-1]]
        if "Grass" in scheme:
            grass.compact(model, rank=SHARE / 2)
            options["shard_placement_fn"] = grass.distributed.shard_placement_fn(model)
        for layer in model:
            fully_shard(layer, **options)
        return fully_shard(model, **options), _input(sizes, dtype, q if "1D" in scheme else ranks)
    spread(model, Grid(mesh, cache_panels="cached" in scheme))
    if "Grass" in scheme:
        grass.compact(model, rank=SHARE / 2)
    return model, _input(sizes, dtype, q, q)


def _input(sizes: Sizes, dtype: torch.dtype, tokens_by: int = 1, features_by: int = 1) -> Tensor:
    return torch.randn(sizes.tokens // tokens_by, sizes.hidden // features_by, dtype=dtype, requires_grad=True)


def third_step(scheme: str, ranks: int, sizes: Sizes) -> dict[str, float]:
    """Elements that this rank receives in the third step, by collective."""
    torch.manual_seed(0)
    model, x = built(scheme, ranks, sizes)
    optimizer = grass.GrassAdamW(model if "Grass" in scheme else model.parameters(), lr=1e-3)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Received() as mode:
        model(x).sum().backward()
    return mode.elements


def counted(rank: int, ranks: int, sizes: Sizes, store: str, path: str) -> None:
    """One rank: the third step of each scheme."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = []
    for scheme in SCHEMES:
        elements = third_step(scheme, ranks, sizes)
        rows.append({"ranks": ranks, "scheme": scheme, "counted": sum(elements.values()), **elements})
    if rank == 0:
        pd.DataFrame(rows).to_csv(path, index=False)
    dist.destroy_process_group()


def count(ranks: int, sizes: Sizes) -> pd.DataFrame:
    """Count all schemes, beside the formulas."""
    with tempfile.TemporaryDirectory() as folder:
        store, path = str(Path(folder) / "store"), str(Path(folder) / "rows.csv")
        mp.spawn(counted, (ranks, sizes, store, path), nprocs=ranks)
        rows = pd.read_csv(path)
    return rows.assign(formula=[received(scheme, ranks, sizes) for scheme in rows.scheme])


def main() -> None:
    args = parse()
    sizes = Sizes(args.tokens, args.hidden, args.wide, args.pairs)
    rows = pd.concat([count(ranks, sizes) for ranks in args.ranks]).fillna(0)
    rows = rows.assign(**sizes._asdict())
    print(rows.to_string(index=False))
    write(rows, args.csv)


def parse() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 9])
    parser.add_argument("--tokens", type=int, default=720)
    parser.add_argument("--hidden", type=int, default=144)
    parser.add_argument("--wide", type=int, default=288)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=Path("runs/grid_costs.csv"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
