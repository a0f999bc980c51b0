"""Checks for failures that raise no error: weights without gradients, overdue refreshes, replaced parameters."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.reads import can_watch
from grass.options import parameter_names
from grass.parallel.shards import is_sharded
from grass.selection.rules import needs_norms
from grass.state.schema import State, shared_steps

logger = logging.getLogger("grass")


SOON = 2
"""Steps without a gradient after which a layer is named, if reads of its weight by other code cannot be seen."""


class Health:
    """Warns once of weights without a gradient for a whole interval, of overdue refreshes, and of parameters of the
    model that the optimizer does not have: unfrozen ones, and those that others were replaced by.
    """

    def __init__(self) -> None:
        self._missed: dict[str, int] = {}
        self._warned: set[str] = set()
        self._left_out: list[_Place] = []
        self._held: list[_Place] = []
        self._turn = 0

    def know(self, model: nn.Module, held: Collection[int]) -> None:
        """Note where a model has the parameters that the optimizer got, by ``id``, and those that are frozen."""
        self._left_out += _frozen(model)
        self._held += [place for place in _places(model) if place.first in held]

    def check(
        self,
        groups: list[dict[str, Any]],
        states: Mapping[Tensor, State],
        layers: Mapping[int, CompactLayer],
        stepped: Collection[int],
    ) -> None:
        """Check all selected weights after a step; ``stepped`` has the ``id`` of those that had a gradient."""
        idle, overdue, position = [], [], 0
        for group in groups:
            names, position = parameter_names(group, position), position + len(group["params"])
            for name, p in zip(names, group["params"], strict=True):
                layer = layers.get(id(p))
                if (layer is None and (group["rank"] is None or p.ndim < 2)) or not p.requires_grad:
                    continue
                name = layer.label if layer is not None and layer.label else name
                if id(p) in stepped:
                    self._missed.pop(name, None)
                elif self._is_idle(name, steps := _patience(layer, group)):
                    idle.append(f"{name!r} (in {steps} steps)")
                if id(p) in stepped and _is_overdue(states.get(p), group):
                    overdue.append(repr(name))
        self._warn("got no gradient and do not train", idle)
        self._warn(
            "have an overdue refresh: no gradient norms arrived. Gradients set by hand, as by torch.autograd.grad, "
            "and backward(inputs=...) bring none in compact mode; selection='uniform' needs none",
            overdue,
        )
        self._check_left_out(groups)
        self._check_replaced(groups)

    def _check_left_out(self, groups: list[dict[str, Any]]) -> None:
        """Name parameters that have been unfrozen and that no group has."""
        unfrozen = [place for place in self._left_out if (p := place.parameter()) is not None and p.requires_grad]
        if not unfrozen:
            return
        held = {id(p) for group in groups for p in group["params"]}
        missing = [place.name for place in unfrozen if id(place.parameter()) not in held]
        self._left_out = [place for place in self._left_out if place not in unfrozen]
        self._warn(
            "were frozen when this optimizer was built from the model, have been unfrozen and do not train: add them "
            "by add_param_group, or build the optimizer before you freeze",
            list(map(repr, missing)),
        )

    def _check_replaced(self, groups: list[dict[str, Any]]) -> None:
        """Name parameters in whose place the model has others now; each step looks at one place, then at all.

        FSDP replaces parameters for the time of a forward: sharded ones are not looked for.
        """
        self._turn = (self._turn + 1) % max(1, len(self._held))
        if not self._held or not self._held[self._turn].is_lost(groups):
            return
        if any(is_sharded(p) for group in groups for p in group["params"]):
            self._held = []
            return
        lost = [place for place in self._held if place.is_lost(groups)]
        self._held = [place for place in self._held if place not in lost]
        self._warn(
            "were replaced after this optimizer was built, as by load_state_dict(..., assign=True) or resized "
            "embeddings, and those in the model now do not train: build the optimizer afterwards",
            [repr(place.name) for place in lost],
        )

    def _is_idle(self, name: str, patience: int) -> bool:
        self._missed[name] = self._missed.get(name, 0) + 1
        return self._missed[name] == patience

    def _warn(self, what: str, names: list[str]) -> None:
        new = [name for name in names if what + name not in self._warned]
        self._warned.update(what + name for name in new)
        if new:
            logger.warning("Grass: %d weights %s: %s", len(new), what, ", ".join(new))


class _Place(NamedTuple):
    """Where a model has a parameter. It keeps neither alive; weak references to parameters would forbid moves."""

    name: str
    module: weakref.ref[nn.Module]
    own_name: str
    first: int
    """``id`` of the parameter that was there when it was noted; an optimizer that holds it keeps it alive."""

    def parameter(self) -> Tensor | None:
        """The parameter that is there now."""
        module = self.module()
        return None if module is None else module._parameters.get(self.own_name)

    def is_lost(self, groups: list[dict[str, Any]]) -> bool:
        """Whether another parameter is there now, which trains but is in no group."""
        p = self.parameter()
        if p is None or id(p) == self.first or not p.requires_grad:
            return False
        return all(p is not own for group in groups for own in group["params"])


def _places(model: nn.Module) -> Iterator[_Place]:
    """Where a model has its parameters."""
    for prefix, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                yield _Place(f"{prefix}.{name}" if prefix else name, weakref.ref(module), name, id(p))


def _frozen(model: nn.Module) -> list[_Place]:
    """The frozen parameters of a model, without the weights of converted layers whose active rows train."""
    layers = [layer for layer in model.modules() if isinstance(layer, CompactLayer)]
    weights = {id(layer.own_weight()) for layer in layers if layer.active.requires_grad}
    places = ((place, place.parameter()) for place in _places(model))
    return [place for place, p in places if p is not None and not p.requires_grad and id(p) not in weights]


def _patience(layer: CompactLayer | None, group: dict[str, Any]) -> int:
    """Steps without a gradient after which a weight is named."""
    return int(group["update_interval"]) if layer is None or can_watch(layer) else SOON


def _is_overdue(state: State | None, group: dict[str, Any]) -> bool:
    if not state or "refresh_step" not in state or not needs_norms(group["selection"]):
        return False
    return bool(shared_steps(state) == 2 * group["update_interval"])
