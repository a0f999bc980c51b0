"""The active rows of a converted layer: which they are, where they are, and how other rows become active."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grass.kernels import reload_rows_
from grass.parallel.shards import local
from grass.selection.draws import draw_generator
from grass.selection.projector import Projector
from grass.state.moments import source_rows
from grass.state.strata import STRATUM_KEY


class ActiveRows(nn.Module):
    """The part of :class:`grass.compact_mode.layer.CompactLayer` that reads and replaces rows.

    That class documents the attributes.
    """

    weight: Any  # nn.Parameter; typed by the plain layers too
    active: nn.Parameter
    chosen: Tensor
    rank: int
    reach: float
    gradient_scale: float
    dim: int
    first_draw: tuple[int, int]
    first_rows: Tensor | None = None  # on the CPU, if calibration has chosen them
    label: str = ""
    selections: int = 0
    experts = 1  # matrices that the weight consists of (grass.compact_mode.experts)
    is_batch = False  # whether they are experts, which rest without tokens
    strata = 1  # parts of the weight that ranks select rows of by themselves (grass.state.strata)
    stratum = 0  # this rank's part
    stores_transposed = False

    @property
    def selected(self) -> Tensor:
        """int64 ``(r,)``: the rows that have optimizer state; a view."""
        return self.chosen[: self.rank]

    @property
    def explored(self) -> Tensor:
        """int64 ``(q,)``: the rows that move without state in this step; a view."""
        return self.chosen[self.rank :]

    def stored(self) -> Tensor:
        """The weight, detached; this rank's part if it is sharded."""
        return local(self.weight).detach()

    def matrix(self) -> Tensor:
        """:meth:`stored` as ``(m, n)``, output features first: a view, except for experts (:meth:`as_matrix`)."""
        return self.as_matrix(self.stored())

    def plain_matrix(self) -> Tensor | None:
        """:meth:`matrix` if that is a view of plain values."""
        return self.matrix()

    def as_matrix(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as ``(m, n)``; a view, except for experts."""
        return weight.t() if self.stores_transposed else weight

    def as_stored(self, matrix: Tensor) -> Tensor:
        """A matrix in the weight's layout: the inverse of :meth:`as_matrix`; a view."""
        return matrix.t() if self.stores_transposed else matrix

    def take(self, weight: Tensor, projector: Projector, out: Tensor | None = None) -> Tensor:
        """The chosen rows of a tensor of the weight's shape, as they are; into ``out`` if given."""
        return projector.gather(self.as_matrix(weight), out=out)

    def take_probed(self, weight: Tensor) -> list[Tensor]:
        """What :meth:`probed_rows` are in a tensor of the weight's shape. A device is not asked for their places."""
        matrix = self.as_matrix(weight)
        return [matrix.index_select(self.dim, self.chosen[i : i + 1]) for i in self.probed()]

    def put(self, weight: Tensor, projector: Projector, rows: Tensor) -> None:
        """Write the chosen rows of a tensor of the weight's shape; the inverse of :meth:`take`."""
        projector.scatter_(self.as_matrix(weight), rows)

    def weight_axis(self, dim: int) -> int:
        """The dimension of ``weight`` that is dimension ``dim`` of the matrix."""
        return dim ^ self.stores_transposed

    def rows(self) -> Tensor:
        """The values of ``active``, detached; this rank's part if they are sharded."""
        return local(self.active).detach()

    def probed_rows(self) -> list[Tensor]:
        """The values of a selected and of an explored row, by which changes of values are found; views."""
        rows = self.rows()
        return [rows.narrow(self.dim, i, 1) for i in self.probed()]

    def line(self) -> Tensor:
        """A line of the weight across all rows that can be selected; a view. Few changes of the weight spare it."""
        stored, axis = self.stored(), self.weight_axis(1 - self.dim)
        return stored.select(axis, stored.shape[axis] // 2)

    def probed(self) -> list[int]:
        """The places of these two among the active rows: the middle ones, which unlike selections seldom share."""
        selected, explored = self.counts()
        return [selected // 2] + [selected + explored // 2] * (explored > 0)

    def selected_part(self, rows: Tensor) -> Tensor:
        """The entries of the selected rows in a tensor shaped like ``active``; a view."""
        return rows if rows.shape[self.dim] == self.rank else rows.narrow(self.dim, 0, self.rank)

    def counts(self) -> list[int]:
        """``[r, q]``."""
        return [self.rank, self.chosen.shape[0] - self.rank]

    def explored_part(self, rows: Tensor) -> Tensor:
        """The entries of the explored rows in a tensor shaped like ``active``; a view."""
        return rows.narrow(self.dim, self.rank, rows.shape[self.dim] - self.rank)

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n)`` of the whole weight, also if it is sharded."""
        return self.weight.shape[self.weight_axis(0)], self.weight.shape[self.weight_axis(1)]

    def projector(self) -> Projector:
        """The projector onto the selected rows."""
        return Projector(self.selected, None, self.dim)

    def active_projector(self) -> Projector:
        """The projector onto the selected and the explored rows."""
        return Projector(self.chosen, None, self.dim)

    def place(self, position: int) -> int:
        """What stands for a parameter's place in random keys, so that strata draw different rows."""
        return position + self.stratum * self.experts * STRATUM_KEY

    def as_parameter(self, rows: Tensor) -> nn.Parameter:
        """Values of active rows as the parameter that trains."""
        return nn.Parameter(rows)

    def of_stratum(self, tensor: Tensor) -> Tensor:
        """This rank's stratum of the weight, the parameter or its gradient; with one stratum, the tensor itself."""
        return tensor

    def rows_of_stratum(self, whole: Tensor) -> Tensor:
        """The stratum's part of a vector over the rows of the whole weight."""
        return whole

    def set_matrix(self, matrix: Tensor) -> None:
        """Make ``matrix (m, n)`` the weight's storage."""
        self.weight.data = self.as_stored(matrix)

    def keep_plain(self, matrix: Tensor) -> None:
        """Make ``matrix (m, n)``, a contiguous copy of the weight's values, its storage."""
        self.set_matrix(matrix)

    def gather(self, projector: Projector, out: Tensor | None = None) -> Tensor:
        """The chosen rows of the weight, into ``out`` if given."""
        raise NotImplementedError

    @torch.no_grad()
    def select(self, indices: Tensor) -> None:
        """Make ``indices (r,)`` the selected rows: those selected already keep their values.

        Call :meth:`explore` afterwards: explored rows may be among them. The weight must have the values of those that
        were selected so far.
        """
        indices = indices.to(self.chosen.device)
        new = Projector(indices, None, self.dim)
        kept, source = source_rows(self.projector(), new, self.shape[self.dim])
        own = self.selected_part(self.rows())
        rows = self.gather(new).to(own.dtype)
        held = Projector(source, None, self.dim).gather(own)
        own.copy_(torch.where(new.along(kept), held, rows))
        self.selected.copy_(indices)
        self.selections += 1

    def draw_first(self) -> Tensor:
        """The rows that a conversion chooses, uniformly unless it calibrates: int64 ``(r + q,)`` on the CPU."""
        if self.first_rows is not None:
            return self.first_rows
        size, generator = self.shape[self.dim] // self.experts, draw_generator(*self.first_draw)
        r, q = (count // self.experts for count in self.counts())
        orders = [torch.randperm(size, generator=generator, device="cpu") for _ in range(self.experts)]
        parts = [(i * size, order) for i, order in enumerate(orders)]
        selected = [start + order[:r].sort().values for start, order in parts]
        return torch.cat(selected + [start + order[r : r + q].sort().values for start, order in parts])

    def draw_first_by(self, seed: int) -> None:
        """Let :meth:`draw_first` draw by another seed, and in place of rows that calibration has chosen."""
        self.first_draw, self.first_rows = (seed, self.first_draw[1]), None

    def rows_repr(self) -> str:
        """Rank, dim and how many rows are explored, as keyword arguments."""
        explored = len(self.explored)
        return f"rank={self.rank}, dim={self.dim}" + (f", explore={explored}" if explored else "")


class ExploredViews(NamedTuple):
    """Views of a layer's explored rows: their values, the matrix that these are from, if it is plain, and which."""

    values: Tensor
    matrix: Tensor | None
    indices: Tensor

    @classmethod
    def of(cls, layer: ActiveRows) -> ExploredViews:
        """Those of a layer."""
        return cls(layer.explored_part(layer.rows()), layer.plain_matrix(), layer.explored)


@torch.no_grad()
def explore(layers: Sequence[ActiveRows], drawn: Sequence[Tensor], views: Sequence[ExploredViews] = ()) -> None:
    """Make rows ``(q,)`` of each layer its explored ones, with its weight's values. ``views`` saves making them."""
    views = views or [ExploredViews.of(layer) for layer in layers]
    torch._foreach_copy_([view.indices for view in views], list(drawn))
    plain: dict[int, list[ExploredViews]] = {}
    for layer, view in zip(layers, views, strict=True):
        if view.matrix is None:
            layer.gather(Projector(view.indices, None, layer.dim), out=view.values)
        else:
            plain.setdefault(layer.dim, []).append(view)
    for dim, places in plain.items():
        reload_rows_(*zip(*places, strict=True), dim=dim)
