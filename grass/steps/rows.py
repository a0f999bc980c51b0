"""Chosen rows of one weight in a step, whether its own or active ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grass.moments import State
from grass.projector import Projector


@dataclass(slots=True)
class Rows:
    """Chosen rows of one weight in a step.

    Attributes:
        weight: the matrix ``(m, n)`` that they are written into; ``None`` where that is not to be done here.
        indices: int64 ``(r,)``, which they are.
        scale: ``(r,)``, ``rho``; ``None`` means ones.
        dim: 0 for rows, 1 for columns.
        grad: of the whole weight ``(m, n)``; with ``values`` the compact one, ``(r, n)`` or ``(m, r)``.
        values: the rows as a tensor of their own; ``None`` means the weight's.
        state: with their moments.
        index: of the parameter among all groups.
        residual: the gradient, placed over the ranks as it is, along which the other rows of the weight move; ``None``:
            they stay.
    """

    weight: Tensor | None
    indices: Tensor
    scale: Tensor | None
    dim: int
    grad: Tensor
    values: Tensor | None
    state: State
    index: int
    residual: Tensor | None = None

    def projector(self) -> Projector:
        """The projector onto them."""
        return Projector(self.indices, self.scale, self.dim)

    def stepped(self) -> Tensor:
        """The tensor whose values are stepped."""
        values = self.weight if self.values is None else self.values
        assert values is not None
        return values
