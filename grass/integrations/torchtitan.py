"""torchtitan: two overrides, one that converts its linear layers and one that gives it :class:`grass.GrassAdamW`.

::

    torchrun ... -m torchtitan.train --module llama3 --config llama3_8b \\
        --parallelism.spmd_backend partial_dtensor --override.imports \\
        'grass.integrations.torchtitan.linear={"rank": 0.25}' grass.integrations.torchtitan.optimizer

Layers are converted on the meta device: where torchtitan builds them, or, with tensor parallelism, where it divides
their weights; both are before ``fully_shard``. Their columns are drawn by their names, when the optimizer is built.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import derive, override
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.linear import Linear

from grass.compact_mode.conversion import compact, expand
from grass.compact_mode.layer import CompactLayer
from grass.coverage import silent
from grass.optimizer import GrassAdamW
from grass.targets import report_coverage

BY_TORCHTITAN = {"params", "lr", "betas", "eps", "weight_decay", "rank", "dim", "explore", "offload"}
"""Arguments of GrassAdamW that torchtitan's own settings have, the conversion, or no sharded model."""

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class GrassLinear(Linear):
    """torchtitan's linear layer in compact mode, with ``dim=1``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Also :func:`grass.compact`'s arguments."""

        rank: float = 0.25
        explore: float | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._conversion: dict[str, Any] = {"rank": config.rank, "explore": config.explore}
        self._convert()

    def _convert(self) -> None:
        with silent():
            compact(self, **self._conversion)

    def _distribute_states(self, parallel_dims: ParallelDims) -> None:
        """Divide the plain layer, then convert it, before torchtitan wraps its ``forward``."""
        if parallel_dims.spmd_backend != "partial_dtensor":
            raise ValueError(
                f"Invalid --parallelism.spmd_backend {parallel_dims.spmd_backend}: Grass takes partial_dtensor"
            )
        expand(self)
        self._cache_pos_arg_names()
        super()._distribute_states(parallel_dims)
        self._distribute_module_applied = isinstance(self.weight, DTensor)  # as torch's own styles mark a layer
        self._convert()

    def _init_param(self, name: str, param: nn.Parameter) -> None:
        """Initialise the weight or the bias; the active columns are the weight's."""
        if name != "active":
            super()._init_param(name, param)


class GrassOptimizers(OptimizersContainer):
    """torchtitan's optimizers, one for each part of the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        options = config.optimizer_factory_kwargs_by_name["GrassAdamW"]
        for model in model_parts:
            draw_columns(model, options.get("seed", 0))
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        return GrassAdamW

    @staticmethod
    def _build_impl_kwargs(config: OptimizersContainer.Config) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts, flat, by the names of parameters."""
        parts = zip(self.model_parts, self.optimizers, strict=True)
        return {k: v for pair in parts for k, v in get_optimizer_state_dict(*pair, options=FLAT).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; each part takes what is its own."""
        for model, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(model, optimizer, optim_state_dict=state_dict, options=FLAT)


def draw_columns(model: nn.Module, seed: int) -> None:
    """Draw the first columns of every layer by its name, which stays the same in a pipeline, and read their values.

    Raises:
        ValueError: no layer is converted.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CompactLayer)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no converted layers: activate grass.integrations.torchtitan.linear too"
        )
    for name, layer in layers.items():
        layer.label, layer.first_draw = name, (seed, layer.place(zlib.crc32(name.encode()) % 2**24))
        layer.chosen.copy_(layer.draw_first())
        layer.reload()
        layer.mark_synced()
    report_coverage(model, "converted", list(layers))


@override(target=Linear.Config, fqns=["*layers.*"], exact=True, description="Grass: linear layers in compact mode")
def linear(config: Linear.Config, **conversion: Any) -> GrassLinear.Config:
    """The linear layers of all blocks; the head stays as it is, and so do layers with a forward of their own.

    Args:
        config: torchtitan's.
        conversion: ``rank`` and ``explore`` of :func:`grass.compact`. A quarter of the columns by default, and as many
            explored ones.

    Raises:
        ValueError: another keyword.
    """
    return derive(config, GrassLinear.Config, **conversion)


@override(target=OptimizersContainer.Config, exact=True, description="Grass: GrassAdamW in the place of AdamW")
def optimizer(config: OptimizersContainer.Config, **options: Any) -> GrassOptimizers.Config:
    """The optimizer with the groups, learning rates, betas and decay rates of torchtitan's AdamW.

    Args:
        config: torchtitan's.
        options: other arguments of :class:`grass.GrassAdamW`.

    Raises:
        TypeError: ``GrassAdamW`` has no such argument, or torchtitan's own settings decide it.
        ValueError: a group is not AdamW's, or the implementation is ``fused_opt_states_bf16``.
    """
    allowed = set(inspect.signature(GrassAdamW).parameters) - BY_TORCHTITAN
    if unknown := sorted(set(options) - allowed):
        raise TypeError(f"Grass takes no {', '.join(unknown)} here: must be one of {', '.join(sorted(allowed))}")
    if others := sorted({group.optimizer_name for group in config.param_groups} - {"AdamW"}):
        raise ValueError(f"Invalid optimizer_name={others[0]!r} of a group: Grass takes the place of 'AdamW'")
    if config.implementation == "fused_opt_states_bf16":
        raise ValueError(
            "Invalid implementation='fused_opt_states_bf16': pass moment_dtype='bfloat16' to this override"
        )
    groups = [derive(group, ParamGroupConfig, optimizer_name="GrassAdamW") for group in config.param_groups]
    factory = {**config.optimizer_factory_kwargs_by_name, "GrassAdamW": options}
    return derive(config, GrassOptimizers.Config, param_groups=groups, optimizer_factory_kwargs_by_name=factory)
