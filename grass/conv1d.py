"""The converted counterpart of Hugging Face's ``Conv1D``; importing this module imports transformers."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grass.layers import CompactLayer


class CompactConv1D(CompactLayer, Conv1D):
    """A converted ``Conv1D``: a linear layer that stores its weight transposed, ``(n, m)``."""

    plain_class: type[nn.Module] = Conv1D

    def matrix(self) -> Tensor:
        """The weight as an ``(m, n)`` view, output features first, detached."""
        matrix: Tensor = self.weight.detach().t()
        return matrix

    def set_matrix(self, matrix: Tensor) -> None:
        """Make ``matrix (m, n)`` the weight's storage."""
        self.weight.data = matrix.t()

    def __repr__(self) -> str:
        return f"CompactConv1D(nf={self.nf}, nx={self.nx}, rank={self.selected.numel()}, dim={self.dim})"
