"""What a unit's tensors were at a time, and how they differ now."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from grass.compact_mode.layer import CompactLayer


class Version(NamedTuple):
    """What a unit's tensors were at a time.

    Attributes:
        steps: how often optimizers had stepped. A fused optimizer does not count its changes in a tensor's version.
        stamps: of the tensors that travel; they differ after any other change that PyTorch can see.
        written: of each converted layer how often a step had written rows into its weight.
    """

    steps: int
    stamps: list[tuple[int, int]]
    written: list[int]


class Change(NamedTuple):
    """How a tensor differs from an earlier version.

    Attributes:
        number: of the tensor among those that travel.
        rows: the rows that differ; ``None``: perhaps all.
        layer: the converted layer whose weight it is, if only rows differ.
    """

    number: int
    rows: Tensor | None = None
    layer: CompactLayer | None = None
