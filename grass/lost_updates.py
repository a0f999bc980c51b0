"""Finds half-precision parameters whose updates are smaller than their spacing, so that nothing moves."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.options import is_projected, parameter_names
from grass.parallel.shards import local
from grass.state.master import is_half, keeps_master

logger = logging.getLogger("grass")

PERIOD = 100
"""Steps from one measurement to the next."""
WINDOW = 16
"""Steps that a measurement takes."""
SAMPLE = 4096
"""Elements of a parameter that are compared, about."""
MOST = 0.5
"""Share of these elements that must not have changed for a warning."""
LEAST_RATE = 0.2
"""Share of the highest learning rate so far below which nothing is measured: at the end of a schedule little moves."""

Groups = list[dict[str, Any]]


class _Before(NamedTuple):
    """What a parameter was when a measurement began.

    Attributes:
        values: of a sample of its elements.
        moving: which of them had a gradient; rows of an embedding without tokens have none.
        selections: how often the rows of a converted layer were selected.
    """

    values: Tensor
    moving: Tensor
    selections: int


class LostUpdates:
    """Warns once of each large half-precision parameter that hardly moves; of active rows, the selected ones count.

    Small ones have a float32 master; those that are rounded stochastically move on average. Weights of dense mode are
    looked at if all their rows move. The device is waited for once in :data:`PERIOD` steps.

    Attributes:
        noting: whether a measurement begins in this step.
    """

    def __init__(self) -> None:
        self.noting = False
        self._low: list[int] = []  # groups whose rate is low now
        self._steps = 0
        self._before: dict[Tensor, _Before] = {}
        self._warned: set[int] = set()
        self._highest: dict[int, float] = {}  # learning rate of each group, by its place

    def count(self, groups: Groups, layers: Mapping[int, CompactLayer]) -> None:
        """Count a step; compare if a measurement ends with it. All weights must be up to date."""
        self._steps += 1
        phase = self._steps % PERIOD
        self.noting = phase == PERIOD - WINDOW
        if phase == 0 and self._before:
            self._compare(groups, layers)
        if self.noting:
            self._low = [id(group) for number, group in enumerate(groups) if self._is_low(number, float(group["lr"]))]
            for _, group, p in _every(groups):
                self.note(p, group, layers)

    def _is_low(self, number: int, lr: float) -> bool:
        self._highest[number] = max(lr, self._highest.get(number, 0.0))
        return lr < LEAST_RATE * self._highest[number]

    def note(self, p: Tensor, group: dict[str, Any], layers: Mapping[int, CompactLayer]) -> None:
        """Begin to measure a parameter that is about to be stepped, if it can lose updates."""
        if p.grad is None or not is_half(p.dtype) or group["stochastic_rounding"]:
            return
        layer = layers.get(id(p))
        if layer is None and (_rests_in_part(group) if is_projected(p, group) else keeps_master(p)):
            return
        if id(p) in self._warned or id(group) in self._low or not float(group["lr"]):
            return
        selections = 0 if layer is None else layer.selections
        self._before[p] = _Before(_sample(p, layer).clone(), _sample(p.grad, layer) != 0, selections)

    def _compare(self, groups: Groups, layers: Mapping[int, CompactLayer]) -> None:
        found = []
        for name, group, p in _every(groups):
            before, layer = self._before.get(p), layers.get(id(p))
            if before is None or not float(group["lr"]) or (layer and layer.selections != before.selections):
                continue
            now = _sample(p, layer)
            if before.values.shape != now.shape:
                continue
            lost = (before.values == now)[before.moving].float().mean().item()  # NaN where nothing had a gradient
            if lost > MOST:
                self._warned.add(id(p))
                found.append(f"{name} ({lost:.0%} of the elements with a gradient)")
        self._before.clear()
        if found:
            logger.warning(
                "Grass: updates of %d parameters are lost: they are smaller than the spacing of half precision. "
                "Unchanged in %d steps: %s. GrassAdamW(stochastic_rounding=True) lets them move on average; in float32 "
                "they move exactly (active rows: grass.compact(dtype=torch.float32))",
                *(len(found), WINDOW, ", ".join(found)),
            )


def _every(groups: Groups) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    """All parameters with their names and groups."""
    position = 0
    for group in groups:
        names, position = parameter_names(group, position), position + len(group["params"])
        for name, p in zip(names, group["params"], strict=True):
            yield repr(name), group, p


def _rests_in_part(group: dict[str, Any]) -> bool:
    """Whether some rows of a group's weights in dense mode do not move in a step."""
    explore = 1.0 if group["explore"] is None and not group["replacement"] else group["explore"]
    return not (isinstance(explore, float) and explore >= 1.0)


def _sample(tensor: Tensor, layer: CompactLayer | None) -> Tensor:
    """Some elements of this rank's part, of a layer's selected rows, an odd number apart: they are of many columns."""
    own = local(tensor.detach())
    own = own if layer is None else layer.selected_part(own)
    with torch.no_grad():
        return own.flatten()[:: own.numel() // SAMPLE | 1]
