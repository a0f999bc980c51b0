"""Checks for failures that raise no error: weights without gradients, overdue refreshes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.reads import can_watch
from grass.selection.rules import needs_norms
from grass.state.schema import State, shared_steps

logger = logging.getLogger("grass")


SOON = 2
"""Steps without a gradient after which a layer is named, if reads of its weight by other code cannot be seen."""


class Health:
    """Warns once about weights without a gradient for a whole interval, overdue refreshes, and unfrozen parameters."""

    def __init__(self) -> None:
        self._missed: dict[str, int] = {}
        self._warned: set[str] = set()
        self._left_out: list[tuple[str, weakref.ref[Tensor]]] = []

    def leave_out(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Note parameters of the model that the optimizer did not get because they were frozen."""
        self._left_out += [(name, weakref.ref(p)) for name, p in named]

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
            for i, p in enumerate(group["params"]):
                layer, position = layers.get(id(p)), position + 1
                if (layer is None and (group["rank"] is None or p.ndim < 2)) or not p.requires_grad:
                    continue
                name = _name(group, i, position - 1, layer)
                if id(p) in stepped:
                    self._missed.pop(name, None)
                elif self._is_idle(name, steps := _patience(layer, group)):
                    idle.append(f"{name!r} (in {steps} steps)")
                if id(p) in stepped and _is_overdue(states.get(p), group):
                    overdue.append(repr(name))
        self._warn("got no gradient and do not train", idle)
        self._warn(
            "have an overdue refresh: no gradient norms arrived. Gradients set by hand, as by torch.autograd.grad, "
            "bring none in compact mode; selection='uniform' needs none",
            overdue,
        )
        self._check_left_out(groups)

    def _check_left_out(self, groups: list[dict[str, Any]]) -> None:
        """Name parameters that have been unfrozen and that no group has."""
        if not any((p := of_p()) is not None and p.requires_grad for _, of_p in self._left_out):
            return
        held = {id(p) for group in groups for p in group["params"]}
        trains = [name for name, of_p in self._left_out if (p := of_p()) is not None and p.requires_grad]
        missing = [name for name, of_p in self._left_out if name in trains and id(of_p()) not in held]
        self._left_out = [item for item in self._left_out if item[0] not in trains]
        self._warn(
            "were frozen when this optimizer was built from the model, have been unfrozen and do not train: add them "
            "by add_param_group, or build the optimizer before you freeze",
            [repr(name) for name in missing],
        )

    def _is_idle(self, name: str, patience: int) -> bool:
        self._missed[name] = self._missed.get(name, 0) + 1
        return self._missed[name] == patience

    def _warn(self, what: str, names: list[str]) -> None:
        new = [name for name in names if what + name not in self._warned]
        self._warned.update(what + name for name in new)
        if new:
            logger.warning("Grass: %d weights %s: %s", len(new), what, ", ".join(new))


def _name(group: dict[str, Any], i: int, position: int, layer: CompactLayer | None) -> str:
    if layer is not None and layer.label:
        return layer.label
    return str(group["param_names"][i]) if "param_names" in group else f"parameter {position}"


def _patience(layer: CompactLayer | None, group: dict[str, Any]) -> int:
    """Steps without a gradient after which a weight is named."""
    return int(group["update_interval"]) if layer is None or can_watch(layer) else SOON


def _is_overdue(state: State | None, group: dict[str, Any]) -> bool:
    if not state or "refresh_step" not in state or not needs_norms(group["selection"]):
        return False
    return bool(shared_steps(state) == 2 * group["update_interval"])
