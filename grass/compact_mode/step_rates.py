"""``scale`` of :func:`grass.attach`: the learning rate that another optimizer gives active rows."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.row_state import is_called
from grass.coverage import report_scale
from grass.selection.exploration import auto_scale

logger = logging.getLogger("grass")


class _Usual(NamedTuple):
    """A setting of a group, its usual value, and that for the length of a step."""

    group: dict[str, Any]
    name: str
    usual: Any
    multiplied: Any


class StepRates:
    """Multiplies the learning rates of an optimizer's groups of active rows for the length of each step.

    Between steps groups have the user's rates, which schedules and checkpoints go by. Decoupled weight decay is divided
    by what the rate is multiplied by, so that its strength, which is the product, stays.

    Args:
        optimizer: whose groups they are.
        layers: whose active rows it trains.
        scale: what rates are multiplied by; ``"auto"``: ``n / (r + q)`` of each layer.

    Raises:
        ValueError: a group holds parameters that need different rates.
    """

    _warned = False

    def __init__(self, optimizer: Optimizer, layers: Collection[CompactLayer], scale: float | str) -> None:
        self._optimizer, self._scale = optimizer, scale
        self._factors = [(layer, factor_of(layer, scale)) for layer in layers]
        self._usual: list[_Usual] = []
        self._scaled: dict[tuple[int, str], Tensor] = {}
        for group in optimizer.param_groups:
            self._factor_of(group)
        if scale == "auto":
            report_scale([factor for _, factor in self._factors])

    def begin(self) -> None:
        """Multiply, before a step."""
        if self._scale == 1:
            return
        self.end()  # that of a step that raised an error
        for number, group in enumerate(self._optimizer.param_groups):
            if (factor := self._factor_of(group)) != 1:
                changes = {"lr": factor}
                if is_decoupled(self._optimizer, group):
                    changes["weight_decay"] = 1 / factor
                for name, times in changes.items():
                    usual = group[name]
                    if usual is None:
                        kind = type(self._optimizer).__name__
                        raise ValueError(f"Invalid scale={self._scale!r}: a group of {kind} has {name}=None")
                    group[name] = self._multiplied(number, name, usual, times)
                    self._usual.append(_Usual(group, name, usual, group[name]))

    def _multiplied(self, number: int, name: str, usual: Any, times: float) -> Any:
        """A setting for the step. Of a tensor always the same other tensor: groups may share the user's.

        Compiled and captured steps hold the tensor that they began with.
        """
        if not isinstance(usual, Tensor):
            return usual * times
        scaled = self._scaled.setdefault((number, name), usual.clone())
        return scaled.copy_(usual).mul_(times)

    def end(self) -> None:
        """Return to the user's rates, after a step; those that a hook has set meanwhile are the user's."""
        while self._usual:
            group, name, usual, multiplied = self._usual.pop()
            if group[name] is multiplied:
                group[name] = usual
            elif not self._warned:
                self._warned = True
                logger.warning(
                    "Grass: a hook of step() sets %r of active rows, which is then not multiplied by scale=%r in that "
                    "step: set it in the loop, by a scheduler for example",
                    name,
                    self._scale,
                )

    def _factor_of(self, group: dict[str, Any]) -> float:
        factor_of = {id(layer.active): factor for layer, factor in self._factors}
        frozen = {id(layer.own_weight()) for layer, _ in self._factors}  # as where a loop gives model.parameters()
        factors = sorted({factor_of.get(id(p), 1.0) for p in group["params"] if id(p) not in frozen})
        if len(factors) > 1:
            raise ValueError(
                f"Invalid scale={self._scale!r}: a group of {type(self._optimizer).__name__} holds parameters whose "
                f"learning rate is to be multiplied by {factors[0]:.3g} and by {factors[-1]:.3g}: make a group of each"
            )
        return factors[0] if factors else 1.0


def factor_of(layer: CompactLayer, scale: float | str) -> float:
    """What the learning rate of a layer's active rows is multiplied by."""
    return auto_scale(layer.shape[layer.dim], *layer.counts()) if scale == "auto" else float(scale)


def is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether weight decay is not a part of the gradient: by what a group says, or by the names of its kind."""
    for key in ("decoupled_weight_decay", "weight_decouple"):
        if key in group:
            return bool(group[key])
    every_adam = type(optimizer).__module__.startswith("bitsandbytes.optim.ada")
    return every_adam or is_called(optimizer, "AdamW", "Adafactor", "Lion", "Muon")
