"""The converted counterpart of Hugging Face's ``Conv1D``; importing this module imports transformers."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from grass.compact_mode.layer import CompactLayer


class CompactConv1D(CompactLayer, Conv1D):
    """A converted ``Conv1D``: a linear layer that stores its weight transposed, ``(n, m)``."""

    plain_class: type[nn.Module] = Conv1D
    stores_transposed = True

    def __repr__(self) -> str:
        weights = f", weights={self.weights}" if self.weights else ""
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, {self.rows_repr()}{weights})"
