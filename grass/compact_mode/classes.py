"""The converted counterpart of each class of linear layers."""

from __future__ import annotations

from torch import nn

from grass.compact_mode.int8 import Int8Linear
from grass.compact_mode.layer import CompactLayer, CompactLinear

COUNTERPARTS: dict[type[nn.Module], type[CompactLayer]] = {}
"""Classes of linear layers that other parts of the package add, with their converted counterparts."""


def compact_class(module: nn.Module, weights: str | None = None) -> type[CompactLayer] | None:
    """The converted counterpart of a module's class; ``None`` if there is none."""
    if type(module) in COUNTERPARTS:
        return COUNTERPARTS[type(module)]
    if type(module) is nn.Linear:
        return Int8Linear if weights == "int8" else CompactLinear
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        from grass.compact_mode.conv1d import CompactConv1D, Int8Conv1D

        return Int8Conv1D if weights == "int8" else CompactConv1D
    if type(module).__name__ == "FalconLinear" and type(module).__module__.startswith("transformers."):
        from grass.compact_mode.falcon import CompactFalconLinear, Int8FalconLinear

        return Int8FalconLinear if weights == "int8" else CompactFalconLinear
    return None
