"""The converted counterpart of Falcon's linear layer; importing this module imports transformers."""

from __future__ import annotations

from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from grass.compact_mode.int8 import Int8Weight
from grass.compact_mode.layer import CompactLayer


class CompactFalconLinear(CompactLayer, FalconLinear):
    """A converted ``FalconLinear``: an ``nn.Linear`` that multiplies and adds in two operations."""

    plain_class: type[nn.Module] = FalconLinear


class Int8FalconLinear(Int8Weight, CompactFalconLinear):
    """A converted ``FalconLinear`` whose weight has 8 bits."""
