r"""The structured sparse projection ``P^T = rho B``: gather rows, scatter them back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grass import kernels
from grass.kernels.dispatch import runs_triton
from grass.kernels.layout import gather, scatter_
from grass.selection.rules import Selection


@dataclass(frozen=True)
class Projector:
    r"""Projects an ``(m, n)`` matrix onto ``r`` of its rows (``dim=0``) or columns (``dim=1``).

    ``P^T = rho B`` with ``B (r, m)``, one 1 in each row, and ``rho = diag(scale)`` (Muhamed et al., 2024, section 3.1).
    ``P`` is never formed: :meth:`project` gathers and :meth:`lift` scatters.

    Attributes:
        indices: int64 ``(r,)``, the chosen rows ``sigma``; one that occurs twice adds up in :meth:`lift`.
        scale: ``(r,)``, ``rho``; ``None`` means ones.
        dim: 0 picks rows, 1 picks columns.
    """

    indices: Tensor
    scale: Tensor | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim not in (0, 1):
            raise ValueError(f"Invalid dim={self.dim!r}: must be 0 (rows) or 1 (columns)")

    @classmethod
    def from_selection(cls, selection: Selection, dim: int, device: torch.device) -> Projector:
        """The projector of a selection, on ``device``."""
        scale = None if selection.scale is None else selection.scale.to(device)
        return cls(selection.indices.to(device), scale, dim)

    def along(self, vector: Tensor) -> Tensor:
        """A vector over the chosen rows ``(r,)``, shaped to broadcast against a compact matrix."""
        return vector.unsqueeze(1 - self.dim)

    def gather(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """``B M``: the chosen rows as they are, ``(m, n) -> (r, n)`` or ``(m, r)``; into ``out``, cast to its dtype."""
        rows: Tensor = gather(matrix, self.indices, self.dim, out)
        return rows

    def scatter_(self, matrix: Tensor, compact: Tensor) -> Tensor:
        """``M[sigma] = C`` in place, cast to the dtype of ``matrix``; the inverse of :meth:`gather`."""
        scatter_(matrix, self.indices, self.dim, compact)
        return matrix

    def rescale(self, compact: Tensor) -> Tensor:
        """``rho C`` for a compact matrix ``C``, in the wider precision; ``C`` itself where every scale is 1."""
        return compact if self.scale is None else compact * self.along(self.scale)

    def project(self, matrix: Tensor) -> Tensor:
        """``P^T M``: gathered and scaled, ``(m, n) -> (r, n)`` or ``(m, r)``."""
        return self.rescale(self.gather(matrix))

    def add_to_(self, matrix: Tensor, compact: Tensor, alpha: float = 1.0) -> Tensor:
        """``M += alpha P C`` in place; duplicate rows add up. Returns ``matrix``."""
        if runs_triton("scatter_add_rows", matrix, compact, self.indices):  # torch's own adds in any order on CUDA
            add = kernels.scatter_add_rows if self.dim == 0 else kernels.scatter_add_cols
            add(matrix, self.indices, compact, self.scale, alpha=alpha)
            return matrix
        return matrix.index_add_(self.dim, self.indices, self.rescale(compact).to(matrix.dtype), alpha=alpha)

    def lift(self, compact: Tensor, size: int) -> Tensor:
        """``P C``: back to full size, zero outside the chosen rows. ``size`` is ``m`` (``dim=1``: ``n``)."""
        shape = list(compact.shape)
        shape[self.dim] = size
        return self.add_to_(compact.new_zeros(shape), compact)
