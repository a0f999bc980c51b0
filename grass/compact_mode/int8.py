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

from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.weight_codes import decode_weight, encode_weight
from grass.compact_mode.weight_storage import StateDict, WeightStorage
from grass.selection.projector import Projector


class Int8Storage(WeightStorage):
    """The weight as int8 codes and scales.

    The layer's ``weight`` has the codes. Its buffer ``weight_scale`` is float32, one for each row or column, whatever
    the model is cast to.

    Attributes:
        plain_dtype: dtype of the weight before conversion and after :func:`grass.expand`.
    """

    weights = "int8"
    key = "weight_codes"
    plain_dtype: torch.dtype

    def scale(self, layer: Any) -> Tensor:
        """One factor per row or column."""
        scale: Tensor = layer.weight_scale
        return scale

    def store(self, layer: CompactLayer, matrix: Tensor) -> None:
        """Quantise ``matrix (m, n)`` to nearest and store it as the weight."""
        codes, scale = encode_weight(matrix, layer.dim)
        self.plain_dtype = matrix.dtype
        layer.set_matrix(codes)
        layer.register_buffer("weight_scale", scale)

    def gather(self, layer: CompactLayer, projector: Projector, out: Tensor | None = None) -> Tensor:
        """The chosen rows, decoded to float32."""
        codes, scale = layer.take(layer.stored(), projector), self.scale(layer)[projector.indices]
        rows = decode_weight(codes, scale, layer.dim, torch.float32)
        return rows if out is None else out.copy_(rows)

    def write_back(self, layer: CompactLayer, key: int | None = None) -> None:
        """Quantise the active rows into the weight."""
        codes, scale = encode_weight(layer.active.detach(), layer.dim, key)
        layer.put(layer.stored(), layer.active_projector(), codes)
        self.scale(layer)[layer.chosen] = scale

    def take_weight(self, layer: CompactLayer) -> None:
        """Take over codes that were changed from outside, unless the active rows were changed too and do not agree.

        Raises:
            RuntimeError: for these, as for averages of all parameters: codes have no average, because scales change.
        """
        now, agreed = layer.stamps(), layer.synced.agreed
        if now is not None and agreed is not None and now[0] != agreed[0]:
            raise RuntimeError(
                f"The 8-bit codes and the active rows of {layer.label!r} were both changed from outside and do not "
                "agree, as by an average of parameters: codes have none. Average by grass.AveragedModel; give a model "
                "another dtype before you copy it"
            )
        layer.reload()

    def holds(self, layer: CompactLayer, *, probe: bool = False) -> bool:
        """Whether the weight's rows equal the active rows to within one step of their codes; compares all of them.

        Rows with values that are not finite are equal where the codes stand for such values too.
        """
        return self._agree(layer, self.gather(layer, layer.active_projector()), layer.active)

    def _agree(self, layer: CompactLayer, decoded: Tensor, rows: Tensor) -> bool:
        steps = self.scale(layer)[layer.chosen].unsqueeze(1 - layer.dim)
        broken = ~steps.isfinite() & ~rows.isfinite().all(1 - layer.dim, keepdim=True)
        return bool((((decoded - rows).abs() <= steps) | broken).all())

    def has_left(self, layer: CompactLayer, probed: list[Tensor]) -> bool:
        """Not known: codes do not hold rows exactly."""
        return False

    def rounds(self, layer: CompactLayer) -> bool:
        """They are."""
        return True

    def refined(self, layer: CompactLayer, *held: Tensor) -> Tensor:
        """The last of ``held`` that agrees with the codes as a whole, else what these stand for."""
        rows = self.gather(layer, layer.active_projector())
        return next((each for each in reversed(held) if self._agree(layer, rows, each)), rows)

    def decay_(self, layer: CompactLayer, factor: float, key: int | None = None) -> None:
        """``W <- factor W``, exactly: only the scales change."""
        self.scale(layer).mul_(factor)

    def unconvert(self, layer: CompactLayer) -> None:
        """Store plain values again."""
        layer.set_matrix(self.plain_matrix(layer))
        del layer.weight_scale

    @torch.no_grad()
    def plain_matrix(self, layer: CompactLayer) -> Tensor:
        """``W (m, n)`` in the dtype before conversion; active rows are rounded only to this dtype."""
        layer.arrive()
        matrix = decode_weight(layer.matrix(), self.scale(layer), layer.dim, self.plain_dtype)
        layer.active_projector().scatter_(matrix, layer.active.detach())
        return matrix

    def after_apply(self, layer: Any, scale: Tensor | None) -> None:
        """Casts of the model do not change the scales, whose rounding would change every weight."""
        assert scale is not None
        if layer.weight_scale.dtype != scale.dtype:
            self.plain_dtype = layer.weight_scale.dtype
            layer.weight_scale = scale.to(layer.weight_scale.device)

    def to_load(self, layer: CompactLayer, state_dict: StateDict, prefix: str) -> tuple[StateDict, Tensor | None]:
        """Codes and scales, also of the weight of a plain model, which is quantised."""
        state_dict, plain = dict(state_dict), None
        if f"{prefix}weight_codes" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}weight_codes")
        elif f"{prefix}weight" in state_dict:
            plain = layer.as_matrix(state_dict[f"{prefix}weight"].to(layer.weight.device))
            codes, state_dict[f"{prefix}weight_scale"] = encode_weight(plain, layer.dim)
            state_dict[f"{prefix}weight"] = layer.as_stored(codes)
        return state_dict, plain


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """``model.state_dict()`` with plain weights instead of codes and scales, for models that were never converted.

    The weights are decoded layer by layer to host memory. The model does not change and may train on;
    :func:`grass.expand` converts the model itself. Without int8 layers the result is ``model.state_dict()``.
    """
    state: dict[str, Tensor] = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, CompactLayer) and isinstance(layer.storage, Int8Storage):
            prefix = f"{name}." if name else ""
            for key in ("weight_codes", "weight_scale"):
                del state[prefix + key]
            weight = layer.as_stored(layer.storage.plain_matrix(layer))
            state[layer.weight_key(prefix)] = weight.cpu().contiguous()
    return state
