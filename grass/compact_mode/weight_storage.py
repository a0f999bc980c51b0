"""How a converted layer keeps its frozen weight: as plain values here, in 8 bits in :mod:`grass.compact_mode.int8`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from grass.compact_mode.synced_rows import same_values
from grass.selection.projector import Projector
from grass.state.master import current
from grass.state.precision import shrink_

if TYPE_CHECKING:
    from grass.compact_mode.layer import CompactLayer

StateDict = dict[str, Any]


class WeightStorage:
    """The part of :class:`grass.compact_mode.layer.CompactLayer` that reads and writes its weight: plain values.

    All tensors are the layer's own, so that they move and are saved with it.

    Attributes:
        weights: what ``grass.compact(weights=...)`` calls it.
        key: the weight's name in a ``state_dict``.
    """

    weights: str | None = None
    key = "weight"

    def scale(self, layer: CompactLayer) -> Tensor | None:
        """A factor for each of the weight's rows (``dim=1``: columns); ``None`` if it holds plain values."""
        return None

    def store(self, layer: CompactLayer, matrix: Tensor) -> None:
        """Make ``matrix (m, n)`` the layer's values, which its weight has already."""
        layer.keep_plain(matrix)

    def gather(self, layer: CompactLayer, projector: Projector, out: Tensor | None = None) -> Tensor:
        """The chosen rows, into ``out`` if given."""
        return layer.take(layer.stored(), projector, out)

    def write_back(self, layer: CompactLayer, key: int | None = None) -> None:
        """Copy the active rows into the weight. ``key``: for stochastic rounding."""
        layer.put(layer.stored(), layer.active_projector(), layer.rows())

    def take_weight(self, layer: CompactLayer) -> None:
        """Take over a weight that was changed from outside."""
        layer.reload_changed()

    def rounds(self, layer: CompactLayer) -> bool:
        """Whether the active rows are more precise than the weight."""
        return bool(layer.active.dtype != layer.weight.dtype)

    def refined(self, layer: CompactLayer, *held: Tensor) -> Tensor:
        """The weight's rows, each value as the last of ``held`` has it that is written back as this value."""
        return current(self.gather(layer, layer.active_projector()), *held)

    def holds(self, layer: CompactLayer, *, probe: bool = False) -> bool:
        """Whether the weight's rows, or those that are probed, are what the active rows are written back as."""
        if probe:
            return not self.has_left(layer, layer.probed_rows())
        rows = self.gather(layer, layer.active_projector())
        return same_values(layer.rows().to(rows.dtype), rows)

    def has_left(self, layer: CompactLayer, probed: list[Tensor]) -> bool:
        """Whether a probed row of the weight is not, or no longer, what one of ``probed`` was written as."""
        pairs = zip(probed, layer.take_probed(layer.stored()), strict=True)
        return not all(same_values(own.to(row.dtype), row) for own, row in pairs)

    def decay_(self, layer: CompactLayer, factor: float, key: int | None = None) -> None:
        """``W <- factor W``. With a ``key``, a half-precision weight is rounded stochastically."""
        shrink_([layer.stored()], factor, None if key is None else [key])

    def unconvert(self, layer: CompactLayer) -> None:
        """Make the weight plain, with the values of the active rows."""
        layer.write_back()

    def after_apply(self, layer: CompactLayer, scale: Tensor | None) -> None:
        """The layer was moved or cast; before it had ``scale``."""

    def to_load(self, layer: CompactLayer, state_dict: StateDict, prefix: str) -> tuple[StateDict, Tensor | None]:
        """The ``state_dict`` with the layer's own names, and ``(m, n)`` if it has values that are not the weight's."""
        return state_dict, None
