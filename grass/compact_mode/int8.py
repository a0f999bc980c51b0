r"""Converted layers whose frozen weight has 8 bits (:mod:`grass.compact_mode.weight_codes`).

Rows are quantised along the dimension in which they are selected, so a step changes only the codes and scales of the
active rows. ``active`` holds the selected rows exactly (float32 by default). They are written back with stochastic
rounding, so a row is rounded once, when it is deselected. Explored rows are decoded, moved and quantised again in each
step in which they are drawn, also with stochastic rounding. Forward and backward decode one layer's weight at a time,
in the dtype of their input.

A ``state_dict`` holds the codes under ``weight_codes`` and no ``weight``, so a plain model reports missing weights
instead of loading codes as weights. :func:`plain_state_dict` makes one that plain models load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.layer import CompactLayer, CompactLinear
from grass.compact_mode.synced_rows import counted
from grass.compact_mode.weight_codes import decode_weight, encode_weight
from grass.selection.projector import Projector


class Int8Weight(CompactLayer):
    """A converted layer that stores its weight as int8 codes and scales.

    Attributes:
        weight: int8 codes; ``weight_codes`` in a ``state_dict``.
        weight_scale: float32, one for each row or column, whatever the model is cast to.
        plain_dtype: dtype of the weight before conversion and after :func:`grass.expand`.
    """

    weights = "int8"
    weight_scale: Tensor
    plain_dtype: torch.dtype

    def store(self, matrix: Tensor) -> None:
        """Quantise ``matrix (m, n)`` to nearest and store it as the weight."""
        codes, scale = encode_weight(matrix, self.dim)
        self.plain_dtype = matrix.dtype
        self.set_matrix(codes)
        self.register_buffer("weight_scale", scale)

    @property
    def weight_codes(self) -> Tensor:
        """The weight under its name in a ``state_dict``, which distributed checkpoint looks up."""
        codes: Tensor = self.weight
        return codes

    def scale(self) -> Tensor:
        """One factor per row or column."""
        return self.weight_scale

    def gather(self, projector: Projector, out: Tensor | None = None) -> Tensor:
        """The chosen rows, decoded to float32."""
        codes, scale = self.take(self.stored(), projector), self.weight_scale[projector.indices]
        rows = decode_weight(codes, scale, self.dim, torch.float32)
        return rows if out is None else out.copy_(rows)

    @counted
    def write_back(self, key: int | None = None) -> None:
        """Quantise the active rows into the weight."""
        codes, scale = encode_weight(self.active.detach(), self.dim, key)
        self.put(self.stored(), self.active_projector(), codes)
        self.weight_scale[self.chosen] = scale

    def take_weight(self) -> None:
        """Take over codes that were changed from outside, unless the active rows were changed too and do not agree.

        Raises:
            RuntimeError: for these, as for averages of all parameters: codes have no average, because scales change.
        """
        now, agreed = self.stamps(), self.synced.agreed
        if now is not None and agreed is not None and now[0] != agreed[0]:
            raise RuntimeError(
                f"The 8-bit codes and the active rows of {self.label!r} were both changed from outside and do not "
                "agree, as by an average of parameters: codes have none. Average by grass.AveragedModel"
            )
        self.reload()

    def holds_active(self) -> bool:
        """Whether the weight's rows equal the active rows to within one step of their codes."""
        steps = self.weight_scale[self.chosen].unsqueeze(1 - self.dim)
        return bool(((self.gather(self.active_projector()) - self.active).abs() <= steps).all())

    def holds_first(self) -> bool:
        """Compares all rows, because codes do not hold exact values."""
        return self.holds_active()

    def decay_(self, factor: float, key: int | None = None) -> None:
        """``W <- factor W``, exactly: only the scales change."""
        self.weight_scale.mul_(factor)

    @torch.no_grad()
    def plain_matrix(self) -> Tensor:
        """``W (m, n)`` in the dtype before conversion; active rows are rounded only to this dtype."""
        self.arrive()
        matrix = decode_weight(self.matrix(), self.weight_scale, self.dim, self.plain_dtype)
        self.active_projector().scatter_(matrix, self.active.detach())
        return matrix

    def plain_key(self, prefix: str) -> str:
        """The name of the weight in the plain model's ``state_dict``, given this layer's prefix."""
        return f"{prefix}weight"

    def plain_weight(self) -> Tensor:
        """:meth:`plain_matrix` as a plain layer stores it."""
        matrix = self.plain_matrix()
        return matrix.t() if self.stores_transposed else matrix

    def unconvert(self) -> None:
        """Store plain values again."""
        self.sync()
        self.set_matrix(self.plain_matrix())
        del self.weight_scale, self.plain_dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Weight:
        """Casts of the model do not change the scales, whose rounding would change every weight."""
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != scale.dtype:
            self.plain_dtype = self.weight_scale.dtype
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight_codes"] = destination.pop(f"{prefix}weight")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads codes and scales, or quantises the weight of a plain model."""
        state_dict, plain = dict(state_dict), None
        if f"{prefix}weight_codes" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}weight_codes")
        elif f"{prefix}weight" in state_dict:
            weight = state_dict[f"{prefix}weight"].to(self.weight.device)
            plain = weight.t() if self.stores_transposed else weight
            codes, state_dict[f"{prefix}weight_scale"] = encode_weight(plain, self.dim)
            state_dict[f"{prefix}weight"] = codes.t() if self.stores_transposed else codes
        super()._load_from_state_dict(state_dict, prefix, *args)
        if plain is not None:
            with torch.no_grad():
                self.active.copy_(self.active_projector().gather(plain))


class Int8Linear(Int8Weight, CompactLinear):
    """A converted ``nn.Linear`` whose weight has 8 bits."""


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """``model.state_dict()`` with plain weights instead of codes and scales, for models that were never converted.

    The weights are decoded layer by layer to host memory. The model does not change and may train on;
    :func:`grass.expand` converts the model itself. Without int8 layers the result is ``model.state_dict()``.
    """
    state: dict[str, Tensor] = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, Int8Weight):
            prefix = f"{name}." if name else ""
            for key in ("weight_codes", "weight_scale"):
                del state[prefix + key]
            state[layer.plain_key(prefix)] = layer.plain_weight().cpu().contiguous()
    return state
