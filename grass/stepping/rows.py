"""Selected and explored rows of one weight in a step, whether parts of it or active rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grass.selection.projector import Projector
from grass.state.schema import State


@dataclass(slots=True)
class Explored:
    """Rows of a weight that move without state (:mod:`grass.selection.exploration`).

    Attributes:
        grad: of the whole weight ``(m, n)``, sharded over the ranks as it is; with ``values`` that of the explored
            rows, ``(q, n)`` or ``(m, q)``.
        reach: how many times as far as the selected rows they move.
        indices: int64 ``(q,)``; ``None``: all rows that are not selected.
        values: the rows as a tensor of their own; ``None`` means the weight's.
    """

    grad: Tensor
    reach: float
    indices: Tensor | None = None
    values: Tensor | None = None


@dataclass(slots=True)
class Rows:
    """Selected rows of one weight in a step, and those explored with them.

    Attributes:
        weight: the matrix ``(m, n)`` that they are written into; ``None`` where that is not to be done here.
        indices: int64 ``(r,)``, which they are.
        scale: ``(r,)``, ``rho``; ``None`` means ones.
        dim: 0 for rows, 1 for columns.
        grad: of the whole weight ``(m, n)``; with ``values`` the compact one, ``(r, n)`` or ``(m, r)``.
        values: the rows as a tensor of their own; ``None`` means the weight's.
        state: with their moments.
        index: of the parameter among all groups.
        explored: other rows that move; ``None``: they stay.
    """

    weight: Tensor | None
    indices: Tensor
    scale: Tensor | None
    dim: int
    grad: Tensor
    values: Tensor | None
    state: State
    index: int
    explored: Explored | None = None

    def projector(self) -> Projector:
        """The projector onto them."""
        return Projector(self.indices, self.scale, self.dim)

    def stepped(self) -> Tensor:
        """The tensor whose values are stepped."""
        values = self.weight if self.values is None else self.values
        assert values is not None
        return values
