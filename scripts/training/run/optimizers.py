"""Optimizers by name: AdamW, Grass and the peers it is compared with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from grass import GrassAdamW, GrassMuon, Offload, compact, param_groups
from grass.coverage import silent
from grass.extras import optional
from grass.muon import SELECTING
from grass.options import DEFAULTS, Options, validate

logger = logging.getLogger(__name__)

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Device types on which torch has a fused AdamW."""

WITH_MODES = ("grass", "muon")
"""Optimizers that have compact mode and dense mode."""

OFFLOADABLE = ("adamw", "grass")
"""Optimizers that can step in host memory."""

_COMMON = frozenset({"lr", "betas", "eps", "weight_decay", "seed"})
_LOW_RANK = _COMMON | {"rank", "update_interval", "scale"}
READS = {
    "adamw": _COMMON,
    "adamw8bit": _COMMON,
    "adafactor": frozenset({"lr", "weight_decay", "seed"}),
    "muon": _COMMON | {"scale"},
    **dict.fromkeys(("galore", "apollo", "fira"), _LOW_RANK),
}
"""Which of Grass's options the other optimizers read. ``seed`` is the run's too."""

GRASS = Options()
"""The defaults of :class:`grass.GrassAdamW`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer and its hyperparameters.

    Fields that are not listed here are those of :class:`grass.options.Options`, for ``name="grass"`` only. Defaults are
    Grass's, except for ``weight_decay`` and ``rank``.

    Attributes:
        name: one of :data:`OPTIMIZERS`.
        lr: peak learning rate.
        weight_decay: decoupled weight decay.
        betas: decay rates of the moments.
        eps: added to the denominator.
        rank: of projected weights, a number or a fraction of the dimension (grass, galore, apollo, fira).
        update_interval: steps between changes of the projection (likewise); ``None`` is Grass's default.
        scale: multiplies the update of projected weights (likewise); ``None`` is the method's default: ``"auto"`` for
            grass and compact muon, 0.25 for galore, 1 for the others. Of muon it multiplies the learning rate of the
            same weights.
        dim: select rows (0), columns (1) or along the smaller dimension (``"auto"``, which is 1 in compact mode).
        compact: convert the model to compact mode, so that full gradients are never formed (grass, muon).
        active_dtype: precision of compact mode's active rows; ``None`` is the weights' precision, float32 for int8.
        weights: ``"int8"`` stores compact mode's frozen weights in 8 bits.
        offload: keep the optimizer's state in host memory and step there (grass, adamw). ``name="adamw"`` is then
            :class:`grass.GrassAdamW` at full rank, which is AdamW.
        offload_masters: float32 masters and moments on the host of half-precision parameters that are stepped whole.
        offload_path: a directory for files that hold the host's state (``grass.Offload(path=...)``).
    """

    name: str = "grass"
    lr: float = float(GRASS.lr)
    weight_decay: float = 0.0
    betas: tuple[float, float] = GRASS.betas
    eps: float = GRASS.eps
    rank: int | float = 0.25
    update_interval: int | None = None
    scale: float | None = None
    selection: str = GRASS.selection
    replacement: bool = GRASS.replacement
    dim: int | str = GRASS.dim
    state_policy: str = GRASS.state_policy
    warmup_after_refresh: int = GRASS.warmup_after_refresh
    seed: int = GRASS.seed
    decay: str = GRASS.decay
    explore: int | float | None = GRASS.explore
    bank_dtype: str = GRASS.bank_dtype
    shard_bank: bool = GRASS.shard_bank
    refresh: str = GRASS.refresh
    sketch_size: int = GRASS.sketch_size
    moment_dtype: str = GRASS.moment_dtype
    stochastic_rounding: bool = GRASS.stochastic_rounding
    compact: bool = False
    active_dtype: str | None = None
    weights: str | None = None
    offload: bool = False
    offload_masters: bool = False
    offload_path: Path | None = None

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"Unknown optimizer {self.name!r}; available: {', '.join(OPTIMIZERS)}")
        if not (self.rank >= 1 if isinstance(self.rank, int) else 0 < self.rank <= 1):
            raise ValueError(f"Invalid rank={self.rank}: must be an integer >= 1 or a fraction in (0, 1]")
        validate({**self.common, "dim": self.dim, **self.grass})
        if self.compact and (self.name not in WITH_MODES or self.replacement):
            raise ValueError(
                f"Invalid compact mode with {self.name}, replacement={self.replacement}: it "
                "takes grass or muon and draws without replacement. Others take --mode dense"
            )
        if not self.compact and (self.active_dtype or self.weights):
            raise ValueError(f"active_dtype={self.active_dtype}, weights={self.weights} need compact=True")
        if self.offload and self.name not in OFFLOADABLE:
            raise ValueError(f"Invalid offload=True with name={self.name}: must be one of {', '.join(OFFLOADABLE)}")
        if not self.offload and (self.offload_masters or self.offload_path is not None):
            given = f"offload_masters={self.offload_masters}, offload_path={self.offload_path}"
            raise ValueError(f"Invalid {given}: need offload=True")

    @property
    def unread(self) -> list[str]:
        """The options with other values than their defaults that this optimizer does not read."""
        read = READS.get(self.name, {"rank", *DEFAULTS}) | ({"rank", "explore", *SELECTING} if self.compact else set())
        options = {"rank", *DEFAULTS} - read
        return sorted(f.name for f in fields(self) if f.name in options and getattr(self, f.name) != f.default)

    @property
    def resumable(self) -> bool:
        """Whether the optimizer's state holds only tensors and plain scalars, as a checkpoint requires.

        Those of GaLore, APOLLO and Fira hold pickled ``Projector`` objects, which ``torch.load(weights_only=True)``
        refuses.
        """
        return self.name not in ("galore", "apollo", "fira")

    @property
    def common(self) -> dict[str, Any]:
        """The arguments that every AdamW takes."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}

    @property
    def host(self) -> Offload | None:
        """What :class:`grass.GrassAdamW` takes as ``offload``."""
        return Offload(masters=self.offload_masters, path=self.offload_path) if self.offload else None

    @property
    def grass(self) -> dict[str, Any]:
        """The other arguments of :class:`grass.GrassAdamW`, without ``rank`` and ``dim``."""
        names = [name for name in DEFAULTS if hasattr(self, name) and name not in {*self.common, "rank", "dim"}]
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        unset = {name for name in ("scale", "update_interval") if getattr(self, name) is None}
        return {name: value for name, value in options.items() if name not in unset}

    @property
    def peer_interval(self) -> int:
        """``update_interval`` of a low-rank peer."""
        return GRASS.update_interval if self.update_interval is None else self.update_interval

    @property
    def grass_dim(self) -> int | str:
        """``dim``; ``"auto"`` is 1 in compact mode, which has one ``dim`` for all weights."""
        return 1 if self.compact and self.dim == "auto" else self.dim


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The configured optimizer over the trainable parameters of ``model``.

    All low-rank methods project the same weights: those that :func:`grass.param_groups` matches. A warning names
    options that the optimizer does not read, as ``rank`` with ``adamw``.

    Raises:
        ImportError: a peer's package is not installed.
    """
    warn_of_unread(config, config.name)
    return OPTIMIZERS[config.name](model, config)


def warn_of_unread(config: OptimizerConfig, reader: str, *read: str) -> None:
    """Warn of options that ``reader``, which trains by the optimizer, does not read; it reads ``read`` besides."""
    if unread := [option for option in config.unread if option not in read]:
        logger.warning("%s does not read %s", reader, ", ".join(f"{o}={getattr(config, o)!r}" for o in unread))


def _adamw(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    fused = all(parameter.device.type in FUSED_DEVICES for parameter in model.parameters()) or None
    if config.offload:  # in float32 what torch's does; in half precision small tensors have float32 masters besides
        return GrassAdamW(model.named_parameters(), **config.common, fused=fused, offload=config.host)
    return AdamW(model.named_parameters(), **config.common, fused=fused)


def convert(module: nn.Module, number: int = 0, *, config: OptimizerConfig) -> None:
    """Convert a model, or its ``number``-th decoder layer, to compact mode; converted layers stay as they are."""
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
    common = {**config.common, "offload": config.host}
    if not config.compact:
        return GrassAdamW(param_groups(model, config.rank, dim=config.grass_dim, **config.grass), **common)
    convert(model, config=config)
    return GrassAdamW(model, **common, **{**config.grass, "explore": None})


def _low_rank_keys(config: OptimizerConfig, scale: str, published: float) -> dict[str, Any]:
    """The group keys that low-rank peers share; ``scale`` is a peer's name for it, ``published`` its default."""
    value = published if config.scale is None else config.scale
    return {"update_proj_gap": config.peer_interval, scale: value, "proj_type": "std"}


def _galore(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    keys = _low_rank_keys(config, "scale", 0.25)
    peer = _peer("galore_torch", "GaLoreAdamW")
    return peer(_low_rank_groups(model, config.rank, keys), **config.common, no_deprecation_warning=True)


def _apollo(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    keys = _low_rank_keys(config, "scale", 1.0) | {"proj": "random", "scale_type": "channel"}
    return _peer("apollo_torch", "APOLLOAdamW")(_low_rank_groups(model, config.rank, keys), **config.common)


def _fira(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    keys = _low_rank_keys(config, "alpha", 1.0)
    peer = _peer("fira", "FiraAdamW")
    return peer(_low_rank_groups(model, config.rank, keys), **config.common, no_deprecation_warning=True)


def _adafactor(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    return Adafactor(model.named_parameters(), lr=config.lr, weight_decay=config.weight_decay)


def _adamw8bit(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    return _peer("torchao.optim", "AdamW8bit")(model.named_parameters(), **config.common)


def _muon(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    if config.compact:
        convert(model, config=config)
        options = {name: config.grass[name] for name in SELECTING if name in config.grass} | {"seed": config.seed}
        return GrassMuon(model, **config.common, **options)
    with silent():
        projected, *rest = param_groups(model, config.rank)
    times = 1.0 if config.scale is None else config.scale
    columns = {"params": projected["params"], "lr": config.lr * times, "muon": True}
    return GrassMuon([columns, *({"params": group["params"]} for group in rest)], **config.common)


OPTIMIZERS: dict[str, Callable[[nn.Module, OptimizerConfig], Optimizer]] = {
    "adamw": _adamw,
    "grass": _grass,
    "galore": _galore,
    "apollo": _apollo,
    "fira": _fira,
    "adafactor": _adafactor,
    "adamw8bit": _adamw8bit,
    "muon": _muon,
}
"""Builders by the name that ``--optimizer`` takes."""


def _peer(module: str, name: str) -> Callable[..., Optimizer]:
    peer: Callable[..., Optimizer] = getattr(optional(module, name), name)
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
