"""Experts whose frozen weights have 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grass.compact_mode.experts import ExpertRows
from grass.compact_mode.int8 import Int8Weight
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.weight_codes import decode_weight, encode_weight
from grass.coverage import EXPERT_ROWS


class Int8ExpertRows(Int8Weight, ExpertRows):
    """The active rows of experts, which also hold the weight: int8 codes. The module itself has none then.

    A ``state_dict`` has codes and scales under the name of this submodule, so a plain model reports a missing weight.
    """

    holds_weight = True

    def matrices(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``(E, n, m)``, decoded."""
        assert scale is not None
        axis = 1 - self.by_rows
        every = scale.view(self.experts, -1)
        return super().matrices(decode_weight(weight, every, axis, dtype), None, dtype)

    def precision(self, x: Tensor) -> torch.dtype:
        """That of the tokens."""
        return x.dtype

    def plain_key(self, prefix: str) -> str:
        """The module's own name for the weight."""
        return prefix.replace(f"{EXPERT_ROWS}.", "").removesuffix(".")

    def plain_weight(self) -> Tensor:
        """The weight as the module had it, ``(E, m, n)`` or ``(E, n, m)``."""
        return self.as_stored(self.plain_matrix())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        CompactLayer._save_to_state_dict(self, destination, prefix, keep_vars)  # the module has no weight to save
        destination[f"{prefix}weight_codes"] = destination.pop(f"{prefix}weight")

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads codes and scales, or quantises the weight of a plain model."""
        self.before_loading()
        *_, missing, _unexpected, _errors = args
        if f"{prefix}weight_codes" in state_dict:
            for name, own in (("weight_codes", self.weight), ("weight_scale", self.weight_scale)):
                own.copy_(state_dict[prefix + name])
            self.reload_changed()
        elif f"{prefix}weight" in state_dict:
            matrix = self.as_matrix(state_dict[f"{prefix}weight"].to(self.weight.device))
            codes, scale = encode_weight(matrix, self.dim)
            self.weight.copy_(self.as_stored(codes))
            self.weight_scale.copy_(scale)
            self.active.copy_(self.active_projector().gather(matrix))
        else:
            missing += [f"{prefix}weight_codes", f"{prefix}weight_scale"]
        self.mark_synced()
