"""A grid of ranks: its collectives along a row and along a column.

Rank ``(i, j)`` of ``a x b`` ranks has the tokens of batch part ``i`` and the features of block ``j``. Of a weight
``(m, n)`` it has output features ``m_j`` and input features ``n_i``. More grids may train replicas of the model, each
on data of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from grass.parallel.ranks import Ranks
from grass.private_names import functional_collectives

collectives = functional_collectives()
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor

WEIGHT = (Shard(1), Shard(0))
"""A weight ``(m, n)``: input features over the grid's rows, output features over its columns."""
TABLE = (Shard(0), Shard(1))
"""An embedding ``(V, h)``: the vocabulary over the grid's rows, features over its columns."""
FEATURES = (Replicate(), Shard(0))
"""A vector of features: over the grid's columns."""
WHOLE = (Replicate(), Replicate())


class Grid:
    """``a x b`` ranks.

    All results may be on their way: the first operation that reads them waits.

    Attributes:
        mesh: of two dimensions, rows and columns.
        row_mesh: the mesh of this rank's row.
        replicas: the mesh of the grids that train replicas of the model, or ``None``.
        rows: ``a``.
        columns: ``b``.
        row: this rank's, ``i``.
        column: this rank's, ``j``.
        panels: pieces in which blocks are gathered, one while another is multiplied.
        cache_panels: whether gathered frozen weights are kept.
        everyone: all ranks, those of replicas too.
        peers: the ranks of this grid.
    """

    def __init__(self, mesh: DeviceMesh, panels: int = 1, cache_panels: bool = False) -> None:
        names = mesh.mesh_dim_names or ()
        self.replicas = mesh[names[0]] if mesh.ndim == 3 else None
        self.mesh = mesh[names[-2:]] if mesh.ndim == 3 else mesh
        self.row_mesh = mesh[names[-1]]
        self.rows, self.columns = self.mesh.shape
        self.row, self.column = self.mesh.get_local_rank(0), self.mesh.get_local_rank(1)
        self.panels, self.cache_panels = panels, cache_panels
        self._along_column, self._along_row = self.mesh.get_group(0), self.mesh.get_group(1)
        self.everyone = self.peers = _ranks(mesh)
        if self.replicas is not None:
            self.peers = _ranks(self.mesh)

    def __deepcopy__(self, memo: Any) -> Grid:
        return self

    def gather_row(self, x: Tensor) -> Tensor:
        """The row's blocks: ``(...) -> (b, ...)``."""
        return _gather(x, self._along_row, self.columns)

    def gather_column(self, x: Tensor) -> Tensor:
        """The column's blocks: ``(...) -> (a, ...)``."""
        return _gather(x, self._along_column, self.rows)

    def scatter_row(self, x: Tensor) -> Tensor:
        """This rank's block of the row's sum: ``(b, ...) -> (...)``."""
        return _scatter(x, self._along_row)

    def scatter_column(self, x: Tensor) -> Tensor:
        """This rank's block of the column's sum: ``(a, ...) -> (...)``."""
        return _scatter(x, self._along_column)

    def sum_row(self, x: Tensor) -> Tensor:
        """The sum over the row, which has all features of the same tokens."""
        summed: Tensor = collectives.all_reduce(x, "sum", self._along_row)
        return summed

    def max_row(self, x: Tensor) -> Tensor:
        """The largest of the row."""
        largest: Tensor = collectives.all_reduce(x, "max", self._along_row)
        return largest

    def sum_tokens(self, x: Tensor) -> Tensor:
        """The sum over the column and over the replicas, which have the same features of all tokens."""
        return self.sum_replicas(collectives.all_reduce(x, "sum", self._along_column))

    def sum_replicas(self, x: Tensor) -> Tensor:
        """The sum over the ranks at this place of all replicas."""
        return x if self.replicas is None else collectives.all_reduce(x, "sum", self.replicas.get_group())

    def shard(self, whole: Tensor, placements: tuple[Placement, ...]) -> DTensor:
        """A tensor that every rank has, as a ``DTensor``; ranks do not communicate."""
        sharded: DTensor = distribute_tensor(whole, self.mesh, placements, src_data_rank=None)
        return sharded

    def own(self, part: Tensor, placements: tuple[Placement, ...]) -> DTensor:
        """The ``DTensor`` that has ``part`` as this rank's part; all parts have one shape."""
        sharded: DTensor = DTensor.from_local(part, self.mesh, placements, run_check=False)
        return sharded


def _ranks(mesh: DeviceMesh) -> Ranks:
    """All ranks of a mesh."""
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        return Ranks.of(None)
    return Ranks(dist.new_group(ranks, use_local_synchronization=True))


def _gather(x: Tensor, group: Any, size: int) -> Tensor:
    if size == 1:
        return x.unsqueeze(0)
    gathered = x.new_empty(size, *x.shape)
    with collectives.allow_inflight_collective_as_graph_input_ctx():  # whoever reads it can wait for it
        # not by the functional all_gather: of two on their way in one gloo group, torch 2.13 mixes up the memory
        all_gather(gathered, x.contiguous().unsqueeze(0), group, async_op=True)
    coming: Tensor = collectives.AsyncCollectiveTensor(gathered)
    return coming


def _scatter(x: Tensor, group: Any) -> Tensor:
    if x.shape[0] == 1:
        return x.squeeze(0)
    own: Tensor = reduce_scatter(x, "sum", 0, group)
    return own.squeeze(0)


def arrived(x: Tensor) -> Tensor:
    """The result of a collective as a plain tensor, once it is there."""
    if isinstance(x, collectives.AsyncCollectiveTensor):
        done: Tensor = x.wait()
        return done
    return x


class SummedGradient(torch.autograd.Function):
    """A parameter that every token reads: its gradient is summed over the tokens of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, features: bool) -> Tensor:
        """The parameter as it is. ``features``: ranks of a row read it too."""
        ctx.grid, ctx.features = grid, features
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum."""
        grad = ctx.grid.sum_tokens(grad.contiguous())
        return arrived(ctx.grid.sum_row(grad) if ctx.features else grad), None, None


class RowSum(torch.autograd.Function):
    """The sum over a row, read by other features on each rank: so their gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        """Sum."""
        ctx.grid = grid
        return arrived(grid.sum_row(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum."""
        return arrived(ctx.grid.sum_row(grad.contiguous())), None


class Gathered(torch.autograd.Function):
    """Blocks of features side by side: ``(t, w) -> (t, g w)``, gathered from ``g`` ranks; gradients are summed back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Any, scatter: Any) -> Tensor:
        """Gather by :meth:`Grid.gather_row` or another; ``scatter`` is its opposite, for the gradient."""
        every = arrived(gather(x))
        ctx.scatter, ctx.count = scatter, every.shape[0]
        return every.transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum and scatter."""
        every = grad.view(grad.shape[0], ctx.count, -1).transpose(0, 1).contiguous()
        return arrived(ctx.scatter(every)), None, None


class WholeLogits(torch.autograd.Function):
    """The logits of the whole batch, ``(b/a, s, V/b) -> (b, s, V)``, of which every rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, grid: Grid) -> Tensor:
        """Gather along the row and the column."""
        ctx.grid, ctx.shape = grid, logits.shape
        vocabulary = torch.cat(list(arrived(grid.gather_row(logits))), dim=-1)
        return torch.cat(list(arrived(grid.gather_column(vocabulary))))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's part."""
        grid, (batch, _, vocabulary) = ctx.grid, ctx.shape
        own = grad.narrow(0, grid.row * batch, batch)
        return own.narrow(2, grid.column * vocabulary, vocabulary).contiguous(), None


class TotalSum(torch.autograd.Function):
    """A sum on the way to the one loss that all ranks compute: each rank has the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Any) -> Tensor:
        """Sum by ``total``, :meth:`Grid.sum_row` or :meth:`Grid.sum_tokens`."""
        return arrived(total(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient as it is."""
        return grad, None
