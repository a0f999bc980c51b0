"""The methods of :data:`grass.memory.METHODS` on a model of fake tensors, each by its own library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

from torch import nn
from torch.optim import AdamW, Optimizer

import grass
from grass.memory import Setting

sys.path.append(str(Path(__file__).parents[1]))
from training.run.optimizers import OptimizerConfig, build_optimizer


def prepare(method: str) -> None:
    """Compute what a method computes only once. Call it before there are fake tensors, which have no contents."""
    if method == "8-bit AdamW":
        from torchao.optim.subclass_8bit import OptimState8bit

        for signed in (True, False):
            OptimState8bit.zeros((256,), signed=signed)


def _adamw(model: nn.Module, setting: Setting, interval: int) -> Optimizer:
    return AdamW(model.parameters(), fused=True)


def _peer(name: str, model: nn.Module, setting: Setting, interval: int) -> Optimizer:
    """A peer of :mod:`training.run.optimizers`; GaLore decomposes in every step, as its largest step does."""
    return build_optimizer(model, OptimizerConfig(name=name, rank=setting.rank, update_interval=1))


def _adamw8bit(model: nn.Module, setting: Setting, interval: int) -> Optimizer:
    return build_optimizer(model, OptimizerConfig(name="adamw8bit"))


def _lora(model: nn.Module, setting: Setting, interval: int) -> Optimizer:
    """``peft`` on the layers that Grass converts; everything else is frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    config = LoraConfig(r=setting.lora_rank, target_modules=grass.matched_modules(model))
    with patch.object(nn.Module, "to", lambda module, *_, **__: module):  # fake parameters cannot be moved in place
        inject_adapter_in_model(config, model)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.requires_grad:
                module._parameters[name] = nn.Parameter(p.detach().to(setting.active_dtype))
    return AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def _dense(model: nn.Module, setting: Setting, interval: int) -> Optimizer:
    groups = grass.param_groups(model, rank=setting.rank)
    return grass.GrassAdamW(groups, dim=setting.dim, state_policy=setting.state_policy, update_interval=interval)


def _in_backward(model: nn.Module, setting: Setting, interval: int) -> Optimizer:
    optimizer = _dense(model, setting, interval)
    grass.step_in_backward(optimizer)
    return optimizer


def _grass(model: nn.Module, setting: Setting, interval: int, weights: str | None = None) -> Optimizer:
    grass.compact(
        model,
        rank=setting.rank,
        explore=setting.explore,
        dim=setting.dim,
        dtype=setting.active_dtype,
        weights=weights,
    )
    return grass.GrassAdamW(
        model,
        selection=setting.selection,
        state_policy=setting.state_policy,
        moment_dtype=setting.moment_dtype,
        update_interval=interval,
    )


BUILDERS: dict[str, Callable[[nn.Module, Setting, int], Optimizer]] = {
    "AdamW": _adamw,
    "8-bit AdamW": _adamw8bit,
    "LoRA": _lora,
    "GaLore": partial(_peer, "galore"),
    "Grass dense": _dense,
    "Grass in backward": _in_backward,
    "Grass": _grass,
    "Grass int8": partial(_grass, weights="int8"),
}
"""``builder(model, setting, steps between refreshes)`` converts the model and makes its optimizer."""
