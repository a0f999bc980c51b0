"""Optimizers by name: AdamW, Grass and the peers it is compared with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from grass import GrassAdamW, compact, param_groups
from grass.coverage import silent
from grass.options import validate

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Device types on which torch has a fused AdamW."""


GRASS_OPTIONS = (
    "update_interval",
    "scale",
    "selection",
    "replacement",
    "state_policy",
    "warmup_after_refresh",
    "seed",
    "decay",
    "explore",
    "bank_dtype",
    "shard_bank",
    "moment_dtype",
    "stochastic_rounding",
    "refresh",
    "sketch_size",
)
"""Fields of :class:`OptimizerConfig` that are keyword arguments of :class:`grass.GrassAdamW` as they are."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer and its hyperparameters.

    Attributes:
        name: one of :data:`OPTIMIZERS`.
        lr: peak learning rate.
        weight_decay: decoupled weight decay.
        betas: decay rates of the moments.
        eps: added to the denominator.
        rank: of the projected weights, a number or a fraction of the dimension (grass, galore, apollo, fira).
        update_interval: steps between changes of the projection (likewise); ``None`` is 200.
        scale: multiplies the update of projected weights (likewise); ``None`` is the method's published value: 0.25 for
            galore, 1 for the others.
        selection: of the rows (this and the rest: grass only, see :class:`grass.GrassAdamW`).
        replacement: draw rows with replacement.
        dim: select rows (0), columns (1) or along the smaller dimension (``"auto"``).
        state_policy: what becomes of the moments at a refresh.
        warmup_after_refresh: steps of learning-rate warm-up after each refresh.
        seed: of the row selection.
        decay: what ``weight_decay`` decays, ``"selected"`` rows or ``"all"``.
        explore: rows that move without state in each step; ``None``: all others in dense mode, as many as ``rank`` in
            compact mode.
        bank_dtype: precision of the bank.
        shard_bank: whether the processes of DDP divide it.
        refresh: how compact mode learns the norms, ``"sketch"`` or ``"exact"``.
        sketch_size: columns of the sketch.
        moment_dtype: precision of the moments of projected weights.
        stochastic_rounding: of updates to half-precision weights.
        compact: convert the model to compact mode, so that full gradients are never formed; ``dim="auto"`` is 1 there.
        active_dtype: precision of compact mode's active rows; ``None`` is the weights', float32 above int8.
        weights: ``"int8"`` holds compact mode's frozen weights in 8 bits.
    """

    name: str = "grass"
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    rank: int | float = 0.25
    update_interval: int | None = None
    scale: float | None = None
    selection: str = "uniform"
    replacement: bool = False
    dim: int | str = 1
    state_policy: str = "keep"
    warmup_after_refresh: int = 0
    seed: int = 0
    decay: str = "selected"
    explore: int | float | None = None
    bank_dtype: str = "float32"
    shard_bank: bool = False
    refresh: str = "sketch"
    sketch_size: int = 32
    moment_dtype: str = "float32"
    stochastic_rounding: bool = False
    compact: bool = False
    active_dtype: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"Unknown optimizer {self.name!r}; available: {', '.join(OPTIMIZERS)}")
        if not (self.rank >= 1 if isinstance(self.rank, int) else 0 < self.rank <= 1):
            raise ValueError(f"Invalid rank={self.rank}: must be an integer >= 1 or a fraction in (0, 1]")
        validate({**self.common, "dim": self.dim, **self.grass})
        if self.compact and (self.name != "grass" or self.replacement):
            raise ValueError(
                f"Invalid compact=True with name={self.name}, replacement={self.replacement}: compact mode "
                "is grass's alone and draws without replacement"
            )
        if not self.compact and (self.active_dtype or self.weights):
            raise ValueError(f"active_dtype={self.active_dtype}, weights={self.weights} need compact=True")

    @property
    def resumable(self) -> bool:
        """Whether the optimizer's state is tensors and plain scalars, as a checkpoint requires.

        The peers keep pickled ``Projector`` objects in theirs, which ``torch.load(weights_only=True)`` rightly refuses.
        """
        return self.name in ("adamw", "grass")

    @property
    def common(self) -> dict[str, Any]:
        """The arguments that every AdamW takes."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}

    @property
    def grass(self) -> dict[str, Any]:
        """The arguments of :class:`grass.GrassAdamW` beyond these, but for ``rank`` and ``dim``."""
        options: dict[str, Any] = {name: getattr(self, name) for name in GRASS_OPTIONS}
        unset = {name for name in ("scale", "update_interval") if getattr(self, name) is None}
        return {name: value for name, value in options.items() if name not in unset}

    @property
    def peer_interval(self) -> int:
        """``update_interval`` of a low-rank peer."""
        return 200 if self.update_interval is None else self.update_interval

    @property
    def grass_dim(self) -> int | str:
        """``dim``, which compact mode cannot choose weight by weight."""
        return 1 if self.compact and self.dim == "auto" else self.dim


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The configured optimizer over the trainable parameters of ``model``.

    All low-rank methods project the same weights: those that :func:`grass.param_groups` matches.

    Raises:
        ImportError: a peer's package is not installed.
    """
    return OPTIMIZERS[config.name](model, config)


def _adamw(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    fused = all(parameter.device.type in FUSED_DEVICES for parameter in model.parameters())
    return AdamW(model.named_parameters(), **config.common, fused=fused or None)


def convert(module: nn.Module, number: int = 0, *, config: OptimizerConfig) -> None:
    """Convert a model, or its ``number``-th decoder layer, to compact mode; what is converted stays as it is."""
    compact(
        module,
        rank=config.rank,
        explore=config.explore,
        dim=int(config.grass_dim),
        dtype=getattr(torch, config.active_dtype) if config.active_dtype else None,
        weights=config.weights,
        seed=config.seed + number,
    )


def _grass(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    if not config.compact:
        return GrassAdamW(param_groups(model, config.rank, dim=config.grass_dim, **config.grass), **config.common)
    convert(model, config=config)
    return GrassAdamW(model, **config.common, **{**config.grass, "explore": None})


def _galore(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    scale = 0.25 if config.scale is None else config.scale
    keys = {"update_proj_gap": config.peer_interval, "scale": scale, "proj_type": "std"}
    peer = _peer("galore_torch", "GaLoreAdamW")
    return peer(_low_rank_groups(model, config.rank, keys), **config.common, no_deprecation_warning=True)


def _apollo(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    scale = 1.0 if config.scale is None else config.scale
    keys = {"update_proj_gap": config.peer_interval, "scale": scale, "proj_type": "std"}
    keys |= {"proj": "random", "scale_type": "channel"}
    return _peer("apollo_torch", "APOLLOAdamW")(_low_rank_groups(model, config.rank, keys), **config.common)


def _fira(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    scale = 1.0 if config.scale is None else config.scale
    keys = {"update_proj_gap": config.peer_interval, "alpha": scale, "proj_type": "std"}
    peer = _peer("fira", "FiraAdamW")
    return peer(_low_rank_groups(model, config.rank, keys), **config.common, no_deprecation_warning=True)


def _adafactor(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    return Adafactor(model.named_parameters(), lr=config.lr, weight_decay=config.weight_decay)


def _adamw8bit(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    return _peer("torchao.optim", "AdamW8bit")(model.named_parameters(), **config.common)


OPTIMIZERS: dict[str, Callable[[nn.Module, OptimizerConfig], Optimizer]] = {
    "adamw": _adamw,
    "grass": _grass,
    "galore": _galore,
    "apollo": _apollo,
    "fira": _fira,
    "adafactor": _adafactor,
    "adamw8bit": _adamw8bit,
}
"""Builders by the name that ``--optimizer`` takes."""


def _peer(module: str, name: str) -> Callable[..., Optimizer]:
    try:
        peer: Callable[..., Optimizer] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ImportError(f"{name} needs {module}: pip install grass-torch[bench]") from error
    return peer


def _low_rank_groups(model: nn.Module, rank: int | float, keys: dict[str, Any]) -> list[dict[str, Any]]:
    """The peers' groups: one for each integer rank, and one without a rank for all other parameters."""
    with silent():  # Grass is not what trains these
        projected, *rest = param_groups(model, rank)
    by_rank: dict[int, list[Any]] = {}
    for name, weight in projected["params"]:
        integer = rank if isinstance(rank, int) else max(1, round(rank * min(weight.shape)))
        by_rank.setdefault(integer, []).append((name, weight))
    groups = [{"params": params, "rank": integer, **keys} for integer, params in by_rank.items()]
    return groups + [{"params": group["params"]} for group in rest]
