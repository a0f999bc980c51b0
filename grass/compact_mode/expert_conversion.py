"""Which weights of experts are converted, and how their active rows come to stand beside them and go again."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from grass.compact_mode.experts import ExpertRows
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.transformers_experts import restore, use_active_rows
from grass.coverage import EXPERT_ROWS
from grass.targets import Targets, expert_weights, matched_experts

logger = logging.getLogger("grass")


def experts_to_convert(
    model: nn.Module, targets: Targets, exclude: Targets, dim: int, weights: str | None
) -> dict[str, ExpertRows]:
    """The active rows of matched experts by the name of the weight; new ones are not part of the model yet.

    Raises:
        ValueError: the weights are to be int8 codes.
    """
    found = {}
    for name in matched_experts(model, targets, exclude):
        module, weight = _split(model, name)
        parameter: Any = module._parameters[weight]
        rows = ExpertRows.of(module, weight)
        if rows is None and not parameter.requires_grad:
            logger.warning("Grass passes over %s: it is frozen", name)
            continue
        found[name] = rows or ExpertRows(parameter, dim, expert_weights(module)[weight])
    if found and weights is not None:
        raise ValueError(f"Invalid {weights=}: does not take experts: leave them out with exclude={[*found][:1]}")
    return found


def is_converted(layer: CompactLayer) -> bool:
    """Whether a layer has its active rows."""
    return "active" in layer._parameters


def put_beside(model: nn.Module, rows: ExpertRows) -> None:
    """Make the active rows part of their module of experts."""
    module, weight = _split(model, rows.label)
    if EXPERT_ROWS not in module._modules:
        module.add_module(EXPERT_ROWS, nn.ModuleDict())
    module.get_submodule(EXPERT_ROWS).add_module(weight, rows)
    if not hasattr(module, "grass_experts"):
        use_active_rows(module)


def take_away(model: nn.Module, rows: ExpertRows) -> None:
    """Make the weight of experts an ordinary parameter again, after its active rows were written into it."""
    module, weight = _split(model, rows.label)
    rows.weight.data = rows.weight.data.contiguous()
    rows.weight.requires_grad_(True)
    every: Any = module.get_submodule(EXPERT_ROWS)
    del every[weight]
    if not every:
        del module._modules[EXPERT_ROWS]
        if not hasattr(module, "grass_experts"):
            restore(module)


def _split(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """A module of experts and the name of one of its weights."""
    path, _, weight = name.rpartition(".")
    return model.get_submodule(path), weight
