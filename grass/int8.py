r"""Converted layers whose frozen weight has 8 bits (:mod:`grass.weight_codes`).

Rows are quantised along the dimension in which they are selected, so that a step touches the codes and scales of the
active rows alone: no other weight is rounded again, however long training goes on. The active rows are the exact values
(float32 unless told otherwise) and written back with stochastic rounding; what a row loses when it is deselected is
that one rounding. Forward and backward form one layer's weight in the dtype of their input at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grass.layers import CompactLayer, CompactLinear
from grass.projector import Projector
from grass.weight_codes import decode_weight, encode_weight


class Int8Weight(CompactLayer):
    """Overrides what a converted layer does with its weight.

    Attributes:
        weight: int8 codes.
        weight_scale: float32, one for each row or column. ``state_dict`` holds both.
        plain_dtype: of the weight before conversion and after :func:`grass.expand`.
    """

    weights = "int8"
    weight_scale: Tensor
    plain_dtype: torch.dtype

    def store(self, matrix: Tensor) -> None:
        """Quantise ``matrix (m, n)`` to nearest and hold it in place of the weight."""
        codes, scale = encode_weight(matrix, self.dim)
        self.plain_dtype = matrix.dtype
        self.set_matrix(codes)
        self.register_buffer("weight_scale", scale)

    def scale(self) -> Tensor:
        """One number per row or column."""
        return self.weight_scale

    def gather(self, projector: Projector) -> Tensor:
        """The chosen rows as the codes have them, float32."""
        codes, scale = projector.gather(self.matrix()), self.weight_scale[projector.indices]
        return decode_weight(codes, scale, self.dim, torch.float32)

    @torch.no_grad()
    def write_back(self, key: int | None = None) -> None:
        """Quantise the active rows into the weight."""
        codes, scale = encode_weight(self.active.detach(), self.dim, key)
        self.projector().scatter_(self.matrix(), codes)
        self.weight_scale[self.selected] = scale

    def holds_active(self) -> bool:
        """Whether the weight's rows are the active rows within one step of their codes."""
        steps = self.weight_scale[self.selected].unsqueeze(1 - self.dim)
        return bool(((self.gather(self.projector()) - self.active).abs() <= steps).all())

    def decay_(self, factor: float, key: int | None = None) -> None:
        """``W <- factor W``, exactly: in the scales."""
        self.weight_scale.mul_(factor)

    def unconvert(self) -> None:
        """Hold plain values again, the active rows' to the last bit."""
        matrix = decode_weight(self.matrix(), self.weight_scale, self.dim, self.plain_dtype)
        self.projector().scatter_(matrix, self.active.detach())
        self.set_matrix(matrix)
        del self.weight_scale, self.plain_dtype

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes codes and scales, or the weight of a plain model, which is then quantised."""
        weight = state_dict.get(f"{prefix}weight")
        if weight is None or not weight.is_floating_point():
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        plain = (weight.t() if self.stores_transposed else weight).to(self.weight.device)
        codes, scale = encode_weight(plain, self.dim)
        quantised = {"weight": codes.t() if self.stores_transposed else codes, "weight_scale": scale}
        super()._load_from_state_dict({**state_dict, **{prefix + k: v for k, v in quantised.items()}}, prefix, *args)
        with torch.no_grad():
            self.active.copy_(self.projector().gather(plain))


class Int8Linear(Int8Weight, CompactLinear):
    """A converted ``nn.Linear`` whose weight has 8 bits."""
