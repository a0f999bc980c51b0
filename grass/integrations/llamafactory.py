"""LLaMA-Factory's trainer ``llamafactory.v1``: a plugin that converts the model, and one that builds the optimizer.

Import this module before the trainer runs, and name both plugins in the configuration. Their names differ, because
LLaMA-Factory has one list for all kinds of plugins::

    import grass.integrations.llamafactory
    from llamafactory.v1.trainers.sft_trainer import run_sft

    run_sft()

with ``peft_config: {name: grass_compact, rank: 0.25}`` and ``optim_config: {name: grass, lr: 1.0e-4}``.

The trainer before v1 is Hugging Face's Trainer and takes :mod:`grass.integrations.transformers`.
"""

from __future__ import annotations

from typing import Any

from llamafactory.v1.plugins.model_plugins.peft import PeftPlugin
from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin
from torch import nn

from grass.compact_mode.conversion import compact
from grass.compact_mode.layer import CompactLayer
from grass.optimizer import GrassAdamW


@PeftPlugin("grass_compact").register()
def convert(model: nn.Module, config: dict[str, Any], is_train: bool) -> nn.Module:
    """Convert the model in ``float32``, as LLaMA-Factory trains whole models, before it is sharded.

    Args:
        model: as loaded.
        config: arguments of :func:`grass.compact`, and ``name``.
        is_train: whether it will train; otherwise it stays plain.
    """
    if is_train:
        compact(model.float(), **_without_name(config))
    return model


@OptimizerPlugin("grass").register()
def optimizer(model: nn.Module, config: dict[str, Any]) -> GrassAdamW:
    """The optimizer of the converted model, also where DDP or FSDP2 has wrapped it.

    Args:
        model: converted by ``peft_config: {name: grass_compact, ...}``.
        config: arguments of :class:`grass.GrassAdamW`, and ``name``. The learning rate is ``lr`` here, because
            LLaMA-Factory does not pass its ``learning_rate`` to plugins.

    Raises:
        ValueError: the model is not converted, or ``lr`` is missing.
    """
    if "lr" not in config:
        raise ValueError("optim_config has no lr: LLaMA-Factory does not pass learning_rate to plugins")
    if not any(isinstance(module, CompactLayer) for module in model.modules()):
        raise ValueError("The model is not converted: give peft_config={'name': 'grass_compact', 'rank': 0.25} too")
    return GrassAdamW(model, **_without_name(config))


def _without_name(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "name"}
