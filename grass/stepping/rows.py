"""The rows of one weight in a step, of two kinds: part of the weight (dense mode), or a tensor of their own (compact).

Backends treat both alike through :class:`Rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from grass.cpu.kernel import Explored
from grass.parallel.shards import local
from grass.selection.projector import Projector
from grass.state.schema import State
from grass.stepping.group import Numbers


class Place(NamedTuple):
    """Where kernels find the values to step, as :func:`grass.kernels.compact_adamw_` takes it.

    Attributes:
        weight: the matrix ``(m, n)``.
        indices: int64, which of its rows.
        rows: the values of these rows if they are a tensor of their own, which is copied into ``weight``.
    """

    weight: Tensor
    indices: Tensor
    rows: Tensor | None


class Rows(Protocol):
    """Selected rows of one weight in a step, and those explored with them.

    Attributes:
        in_weight: whether the rows are part of the weight, and ``grad`` is the gradient of all of it.
    """

    in_weight: ClassVar[bool]

    @property
    def weight(self) -> Tensor | None:
        """The matrix ``(m, n)`` that they are part of or written into; ``None`` if the layer writes it."""

    @property
    def indices(self) -> Tensor:
        """int64 ``(r,)``."""

    @property
    def scale(self) -> Tensor | None:
        """``(r,)``, ``rho``; ``None`` means ones."""

    @property
    def dim(self) -> int:
        """0 for rows, 1 for columns."""

    @property
    def grad(self) -> Tensor:
        """The gradient of the weight ``(m, n)`` if the rows are ``in_weight``, otherwise the rows' own, ``(r, n)``."""

    @property
    def values(self) -> Tensor | None:
        """The rows ``(r, n)`` if they are a tensor of their own."""

    @property
    def state(self) -> State:
        """The state with their moments."""

    @property
    def index(self) -> int:
        """The place of the parameter among all groups."""

    @property
    def explored(self) -> Explored | None:
        """Other rows that move; ``None``: they stay."""

    def place(self) -> Place:
        """Where kernels find the selected rows."""

    def gather_grad(self, out: Tensor) -> Tensor:
        """The rows' gradient in the dtype of ``out``, which may be used for it."""

    def gather(self, out: Tensor) -> Tensor:
        """The rows' values in the dtype of ``out``, which may be used for them."""

    def put(self, stepped: Tensor, shrink: float) -> None:
        """Write back what :meth:`gather` returned, after the step."""

    def explored_place(self) -> Place:
        """Where kernels find the explored rows."""

    def explored_grad(self) -> Tensor:
        """This rank's part of the gradient that holds theirs."""

    @property
    def rounds_always(self) -> bool:
        """Whether the weight is narrower than the rows: explored rows would lose their moves by rounding to nearest."""


@dataclass(slots=True)
class DenseExplored:
    """Explored rows that are part of the weight; attributes as in :class:`grass.cpu.kernel.Explored`."""

    values: ClassVar[None] = None
    grad: Tensor
    reach: float
    turns: float
    auto_scale: float
    indices: Tensor | None


@dataclass(slots=True)
class DenseRows:
    """Rows that are part of their weight; attributes as in :class:`Rows`."""

    in_weight: ClassVar[bool] = True
    values: ClassVar[None] = None
    rounds_always: ClassVar[bool] = False
    weight: Tensor
    indices: Tensor
    scale: Tensor | None
    dim: int
    grad: Tensor
    state: State
    index: int
    explored: DenseExplored | None
    finish: Callable[[], None] | None = None  # to call after the step

    def place(self) -> Place:
        """The selected rows of the weight."""
        return Place(self.weight, self.indices, None)

    def gather_grad(self, out: Tensor) -> Tensor:
        """Into ``out``, scaled."""
        projector = self._projector()
        return projector.rescale(projector.gather(self.grad, out=out))

    def gather(self, out: Tensor) -> Tensor:
        """Into ``out``; zeros if the rows are scaled (:func:`rows_to_step`)."""
        return rows_to_step(self.weight, self._projector(), out)

    def put(self, stepped: Tensor, shrink: float) -> None:
        """Write into the weight; changes of scaled rows add up."""
        put_back_(self.weight, self._projector(), stepped, shrink)

    def explored_place(self) -> Place:
        """The explored rows of the weight, by default all that are not selected."""
        assert self.explored is not None
        indices = self.explored.indices
        if indices is None:
            indices = _unselected(self.indices, self.weight.shape[self.dim])
        return Place(self.weight, indices, None)

    def explored_grad(self) -> Tensor:
        """The gradient of the weight."""
        return self.grad

    def _projector(self) -> Projector:
        return Projector(self.indices, self.scale, self.dim)


@dataclass(slots=True)
class CompactExplored:
    """Explored rows that are a tensor of their own; attributes as in :class:`grass.cpu.kernel.Explored`."""

    grad: Tensor
    reach: float
    turns: float
    auto_scale: float
    indices: Tensor
    values: Tensor


@dataclass(slots=True)
class CompactRows:
    """Rows that are a tensor of their own, ``values``; attributes as in :class:`Rows`."""

    in_weight: ClassVar[bool] = False
    scale: ClassVar[None] = None
    weight: Tensor | None
    indices: Tensor
    dim: int
    grad: Tensor
    values: Tensor
    state: State
    index: int
    explored: CompactExplored | None

    def place(self) -> Place:
        """The rows and where they go; without a weight only the rows."""
        return self._place(self.indices, self.values)

    def gather_grad(self, out: Tensor) -> Tensor:
        """The gradient itself, cast."""
        return self.grad.to(out.dtype)

    def gather(self, out: Tensor) -> Tensor:
        """The rows themselves, cast."""
        return self.values.to(out.dtype)

    def put(self, stepped: Tensor, shrink: float) -> None:
        """Write into the rows, and these into the weight."""
        if stepped is not self.values:
            self.values.copy_(stepped)
        if self.weight is not None:
            Projector(self.indices, None, self.dim).scatter_(self.weight, self.values)

    def explored_place(self) -> Place:
        """The explored rows and where they go; without a weight only the rows."""
        assert self.explored is not None
        return self._place(self.explored.indices, self.explored.values)

    def explored_grad(self) -> Tensor:
        """The gradient of the explored rows."""
        assert self.explored is not None
        return local(self.explored.grad)

    @property
    def rounds_always(self) -> bool:
        """Whether the weight is narrower than the rows."""
        return self.weight is not None and self.weight.dtype.itemsize < self.values.dtype.itemsize

    def _place(self, indices: Tensor, values: Tensor) -> Place:
        if self.weight is not None:
            return Place(self.weight, indices, values)
        return Place(values, torch.arange(values.shape[self.dim], device=values.device), None)


Numbered = tuple[Rows, Numbers]
"""Rows with the numbers of their step."""


def shared_by_kernels(item: Numbered) -> object:
    """What the rows of one call of a kernel share. Kernels themselves divide them by shapes and types."""
    rows, numbers = item
    ages = numbers.row_steps
    values = rows.dim, rows.in_weight, rows.weight is None, "exp_avg_scale" in rows.state, rows.state["exp_avg"].dtype
    return *values, None if isinstance(ages, Tensor) else ages, *numbers[1:]


def ages_of(alike: list[Numbered]) -> list[Tensor] | int:
    """Adam steps as kernels take them: a number that all rows share, or a tensor for each weight."""
    ages = alike[0][1].row_steps
    return [numbers.row_steps for _, numbers in alike] if isinstance(ages, Tensor) else ages  # type: ignore[misc]


def _unselected(indices: Tensor, size: int) -> Tensor:
    """All rows except those of ``indices``, ascending; without reading how many there are from the device."""
    others = torch.ones(size, dtype=torch.uint8, device=indices.device).index_fill_(0, indices, 0)
    return others.sort(descending=True, stable=True).indices[: size - indices.numel()]


def rows_to_step(weight: Tensor, projector: Projector, out: Tensor) -> Tensor:
    """The values to step, in ``out``: those of the chosen rows, or zeros if the rows are scaled.

    Scaled rows may repeat: each is decayed once, and the changes of all its copies are added up.
    """
    return projector.gather(weight, out=out) if projector.scale is None else out.zero_()


def put_back_(weight: Tensor, projector: Projector, rows: Tensor, shrink: float) -> None:
    """Write the stepped ``rows`` of :func:`rows_to_step` back to ``weight``."""
    if projector.scale is None:
        projector.scatter_(weight, rows)
        return
    projector.scatter_(weight, projector.gather(weight).to(rows.dtype).mul_(shrink))
    projector.add_to_(weight, rows)
