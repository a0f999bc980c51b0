"""What the tokens of a language model are to predict."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""The target of tokens that do not count, as in ``F.cross_entropy``."""


def next_tokens(labels: Tensor) -> Tensor:
    """Each token's target, the label of the next one: ``(..., s) -> (..., s)``; the last token does not count."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
