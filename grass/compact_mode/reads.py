"""Reads of a converted layer's weight by other code than the layer, found while the model trains.

The weight is frozen, and only the layer's own forward leads gradients to the active rows. If other code computes with
the weight, as ``F.linear(x, layer.weight)``, nothing of the layer trains. This shows in the graph: as long as the
active rows have had no gradient, the weight takes one (``requires_grad=True`` from the end of a step on). A layer that
is not used gets none. Nothing is computed or stored for a layer that is called, because its forward detaches the
weight.

A layer that is called and whose weight is read as well trains, but on a part of its gradient. So once, in the second
step, its weight takes a gradient too, from the layer's forward on, and a warning names such layers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.synced_rows import Listener
from grass.private_names import has_compiled

logger = logging.getLogger("grass")


class Reads:
    """Watches the layers of an optimizer until their active rows get a gradient."""

    def __init__(self) -> None:
        self._proven: set[int] = set()  # ids of layers that are held as long as the optimizer
        self._watched: list[CompactLayer] = []
        self._looks: list[_Look] = []

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
        self._end_looks()
        waiting = [layer for layer in layers if id(layer) not in self._proven]
        for layer in waiting:
            had_gradient = id(layer._parameters["active"]) in stepped
            if had_gradient:
                self._proven.add(id(layer))
            if can_watch(layer) and had_gradient == _weight_of(layer).requires_grad:
                _weight_of(layer).requires_grad_(not had_gradient)
        self._watched = [layer for layer in waiting if id(layer) not in self._proven and can_watch(layer)]
        called = [layer for layer in waiting if id(layer) in self._proven and can_watch(layer)]
        if called and not has_compiled():  # compiled code would be compiled again
            self._looks = [_Look(layer, self) for layer in called]

    def _end_looks(self) -> None:
        for look in self._looks:
            look.end()
        if names := [look.layer.label for look in self._looks if look.seen]:
            logger.warning(
                "Grass: other code computes with the weights of converted layers as well, by reading them or in a "
                "penalty on weights: %s. That part of their gradient is lost. Leave them out: "
                "grass.compact(..., exclude=%s)",
                ", ".join(map(repr, names)),
                names,
            )
        self._looks = []


class _Look(Listener):
    """Lets the weight of a layer that is called take a gradient, from the next forward until :meth:`end`."""

    def __init__(self, layer: CompactLayer, reads: Reads) -> None:
        self.layer, self.seen = layer, False
        self._reads = weakref.ref(reads)
        self._weight: nn.Parameter | None = None
        self._hook: Any = None
        layer.listeners = (*layer.listeners, self)

    def before_forward(self) -> None:
        """Begin."""
        if self._reads() is None:
            self.end()
        elif self._weight is None:
            self._weight = _weight_of(self.layer)
            self._weight.requires_grad_(True)
            self._hook = self._weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Freeze the weight again, if it still is the layer's."""
        if self._listens():
            self.layer.listeners = tuple(each for each in self.layer.listeners if each is not self)
            if self._weight is not None and self.layer._parameters.get("weight") is self._weight:
                self._weight.requires_grad_(False)
        if self._hook is not None:
            self._hook.remove()

    def _note(self, weight: nn.Parameter) -> None:
        """Some code has computed with the weight. Its gradient would be counted as others are, as in their norm."""
        if self._listens():
            self.seen, weight.grad = True, None
        else:
            self.end()

    def _listens(self) -> bool:
        """Not once :func:`grass.expand` has made a plain layer of it."""
        return any(each is self for each in getattr(self.layer, "listeners", ()))


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
