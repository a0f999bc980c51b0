"""Which weights of experts are converted, and how their active rows come to stand beside them and go again."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from grass.compact_mode.experts import ExpertRows
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.synced_rows import copy_parameters_last
from grass.compact_mode.transformers_experts import restore, use_active_rows
from grass.coverage import EXPERT_ROWS
from grass.parallel.shards import is_sharded
from grass.targets import Targets, expert_weights, matched_experts

logger = logging.getLogger("grass")


def experts_to_convert(model: nn.Module, targets: Targets, exclude: Targets, dim: int) -> dict[str, ExpertRows]:
    """The active rows of matched experts by the name of the weight; new ones are not part of the model yet."""
    found = {}
    for name in matched_experts(model, targets, exclude):
        module, weight = _split(model, name)
        parameter: Any = module._parameters[weight]
        rows = ExpertRows.of(module, weight)
        if rows is None and not parameter.requires_grad:
            logger.warning("Grass passes over %r: it is frozen", name)
            continue
        if rows is None:
            cls = _class_for(model, name, parameter)
            rows = cls(parameter, dim, expert_weights(module)[weight])
        found[name] = rows
    return found


def _class_for(model: nn.Module, name: str, weight: Any) -> type[ExpertRows]:
    """The class of active rows of a weight that is not converted, after checks of how ranks divide it."""
    if is_sharded(weight):
        from grass.compact_mode.expert_parallel import ExpertParallelRows, check_divided  # torch.distributed is there

        check_divided(model, name, weight)
        return ExpertParallelRows
    return ExpertRows


def is_converted(layer: CompactLayer) -> bool:
    """Whether a layer has its active rows."""
    return "active" in layer._parameters


def put_beside(model: nn.Module, rows: ExpertRows) -> None:
    """Make the active rows part of their module of experts."""
    module, weight = _split(model, rows.label)
    if EXPERT_ROWS not in module._modules:
        module.add_module(EXPERT_ROWS, nn.ModuleDict())
        copy_parameters_last(module)
    module.get_submodule(EXPERT_ROWS).add_module(weight, rows)
    if rows.holds_weight:
        module._parameters[weight] = None
        rows.__dict__["hook"] = module.register_load_state_dict_pre_hook(_hand_down)  # type: ignore[no-untyped-call]
    if not hasattr(module, "grass_experts"):
        use_active_rows(module)


def take_away(model: nn.Module, rows: ExpertRows) -> None:
    """Make the weight of experts an ordinary parameter again, after its active rows were written into it."""
    module, weight = _split(model, rows.label)
    rows.weight.requires_grad_(True)
    module._parameters[weight] = rows.weight
    if (hook := rows.__dict__.pop("hook", None)) is not None:
        hook.remove()
    every: Any = module.get_submodule(EXPERT_ROWS)
    del every[weight]
    if not every:
        del module._modules[EXPERT_ROWS]
        if not hasattr(module, "grass_experts"):
            restore(module)


def _hand_down(module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Give plain weights of experts that are loaded to those that hold them as codes."""
    for name in module.get_submodule(EXPERT_ROWS)._modules:
        if prefix + name in state_dict:
            state_dict[f"{prefix}{EXPERT_ROWS}.{name}.weight"] = state_dict.pop(prefix + name)


def _split(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """A module of experts and the name of one of its weights."""
    path, _, weight = name.rpartition(".")
    return model.get_submodule(path), weight
