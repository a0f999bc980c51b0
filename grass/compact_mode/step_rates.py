"""``scale`` of :func:`grass.attach`: the learning rate that another optimizer gives active rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer
from grass.coverage import report_scale
from grass.selection.exploration import auto_scale


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

    def __init__(self, optimizer: Optimizer, layers: Collection[CompactLayer], scale: float | str) -> None:
        self._optimizer, self._scale = optimizer, scale
        self._factors = [(layer, factor_of(layer, scale)) for layer in layers]
        self._usual: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group in optimizer.param_groups:
            self._factor_of(group)
        if scale == "auto":
            report_scale([factor for _, factor in self._factors])

    def begin(self) -> None:
        """Multiply, before a step."""
        if self._scale == 1:
            return
        self.end()  # that of a step that raised an error
        for group in self._optimizer.param_groups:
            if (factor := self._factor_of(group)) != 1:
                changed = {"lr": factor}
                if is_decoupled(self._optimizer, group):
                    changed["weight_decay"] = 1 / factor
                self._usual.append((group, {name: _copied(group[name]) for name in changed}))
                for name, times in changed.items():
                    _set(group, name, group[name] * times)

    def end(self) -> None:
        """Return to the user's rates, after a step."""
        while self._usual:
            group, values = self._usual.pop()
            for name, value in values.items():
                _set(group, name, value)

    def _factor_of(self, group: dict[str, Any]) -> float:
        factor_of = {id(layer.active): factor for layer, factor in self._factors}
        factors = sorted({factor_of.get(id(p), 1.0) for p in group["params"]})
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
    """Whether weight decay is not a part of the gradient."""
    known = isinstance(optimizer, (torch.optim.AdamW, torch.optim.Muon, torch.optim.Adafactor))
    return known or bool(group.get("decoupled_weight_decay"))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    """Change a setting, in place where it is a tensor, which compiled and captured steps hold."""
    if isinstance(group[name], Tensor):
        group[name].copy_(value)
    else:
        group[name] = value
