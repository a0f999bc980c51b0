"""Reads of a converted layer's weight by other code than the layer, found while the model trains.

The weight is frozen, and only the layer's own forward leads gradients to the active rows. If other code computes with
the weight, as ``F.linear(x, layer.weight)``, nothing of the layer trains. This shows in the graph: as long as the
active rows have had no gradient, the weight takes one (``requires_grad=True`` from the end of a step on). A layer that
is not used gets none. Nothing is computed or stored for a layer that is called, because its forward detaches the
weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from grass.compact_mode.layer import CompactLayer


class Reads:
    """Watches the layers of an optimizer until their active rows get a gradient."""

    def __init__(self) -> None:
        self._proven: set[int] = set()  # ids of layers that are held as long as the optimizer
        self._watched: list[CompactLayer] = []

    def check(self) -> None:
        """Refuse weights that other code computes with.

        Raises:
            RuntimeError: a gradient has reached the weight of a layer; names all such layers.
        """
        read = [layer for layer in self._watched if _weight_of(layer).grad is not None]
        for layer in read:
            _weight_of(layer).grad = None
        if names := [layer.label for layer in read]:
            raise RuntimeError(
                "Other code computes with the weights of converted layers that are not called: "
                f"{', '.join(map(repr, names))}. Their active rows get no gradient, so they would never train. Leave "
                f"them out: grass.compact(..., exclude={names})"
            )

    def watch(self, layers: Iterable[CompactLayer], stepped: Collection[int]) -> None:
        """Let weights take a gradient if their active rows have had none; ``stepped`` has the ``id`` of those that had.

        Called after each step.
        """
        waiting = [layer for layer in layers if id(layer) not in self._proven]
        for layer in waiting:
            had_gradient = id(layer._parameters["active"]) in stepped
            if had_gradient:
                self._proven.add(id(layer))
            if can_watch(layer) and had_gradient == _weight_of(layer).requires_grad:
                _weight_of(layer).requires_grad_(not had_gradient)
        self._watched = [layer for layer in waiting if id(layer) not in self._proven and can_watch(layer)]


def can_watch(layer: CompactLayer) -> bool:
    """Whether a weight can take a gradient: not one that is frozen with its rows, sharded, in 8 bits or moved."""
    weight, active = layer._parameters["weight"], layer._parameters["active"]
    plain = type(weight) is nn.Parameter and weight.is_floating_point() and layer.strata == 1
    return (
        plain and active is not None and active.requires_grad and not any(each.moves_weight for each in layer.listeners)
    )


def _weight_of(layer: CompactLayer) -> nn.Parameter:
    """The frozen weight, past ``__getattr__``, which is slow."""
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight
