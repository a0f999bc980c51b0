"""Command-line flags that the scripts share, and configurations made from them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grass.command_line import number
from grass.options import DECLARED
from grass.selection import available_rules
from training.run.optimizers import GRASS, WITH_MODES, OptimizerConfig

CONFIG = OptimizerConfig()
"""The scripts' defaults, but of ``--mode`` and ``--rank``: see :func:`optimizer_from_flags`."""

COMPACT_RANK = 0.125
"""``--rank`` of grass in compact mode, which explores as many columns as it selects."""

AddFlag = Callable[..., Any]
"""``add_argument`` of a parser or of one of its groups."""


def from_flags(cls: type[Any], args: argparse.Namespace, **others: Any) -> Any:
    """A configuration from the flags that are named like its fields; ``others`` take precedence."""
    names = {field.name for field in dataclasses.fields(cls)} & vars(args).keys()
    return cls(**{name: getattr(args, name) for name in names} | others)


def optimizer_from_flags(args: argparse.Namespace, name: str) -> OptimizerConfig:
    """The configuration of optimizer ``name``; ``args.mode`` and ``args.rank`` become what they are by default."""
    args.mode = args.mode or ("compact" if name in WITH_MODES else "dense")
    compact = args.mode == "compact"
    if args.rank is None:
        args.rank = COMPACT_RANK if compact and name == "grass" else CONFIG.rank
    config: OptimizerConfig = from_flags(OptimizerConfig, args, name=name, compact=compact)
    return config


def add_optimizer_flags(add: AddFlag) -> None:
    """Hyperparameters of :class:`training.run.optimizers.OptimizerConfig` except its name."""
    add("--lr", type=float, default=CONFIG.lr, help="peak learning rate")
    add("--weight-decay", type=float, default=CONFIG.weight_decay, help="decoupled")
    add("--betas", type=float, nargs=2, default=CONFIG.betas, help=DECLARED["betas"].metadata["meaning"])
    modes = "grass, muon: never form full gradients, the default, or form them; dim auto is 1 in compact mode"
    add("--mode", choices=("compact", "dense"), help=modes)
    rank = f"an integer, or a fraction of the dimension; default: {COMPACT_RANK} of compact grass, else {CONFIG.rank}"
    add("--rank", type=number, help=rank)
    interval = f"steps between changes of the projection; default: {GRASS.update_interval}"
    add("--update-interval", type=int, help=interval)
    scale = "of the projected weights' update; auto, the default: grass n / (r + q), galore 0.25, others 1"
    add("--scale", type=_scale, metavar="SCALE", help=scale)
    for name in ("selection", "replacement", "dim", "state_policy", "explore", "moment_dtype", "bank_dtype"):
        add_option(add, name)
    for name in ("shard_bank", "stochastic_rounding", "warmup_after_refresh"):
        add_option(add, name)
    add("--active-dtype", choices=("float32", "bfloat16"), help="compact: of active rows; default: the weights'")
    add("--weights", choices=("int8",), help="compact: precision of frozen weights; default: --dtype")
    add(
        "--offload",
        action="store_true",
        help="grass, adamw: keep the optimizer's state in host memory and step there during the next forward; "
        "adamw is then GrassAdamW at full rank, which is AdamW",
    )
    add(
        "--offload-masters",
        action="store_true",
        help="--offload: float32 masters and moments of half-precision parameters that are stepped whole",
    )
    add(
        "--offload-path",
        type=Path,
        metavar="DIRECTORY",
        help="--offload: state, and with --stream frozen weights, in files there",
    )


def add_option(add: AddFlag, name: str) -> None:
    """A flag for one field of :class:`grass.options.Options`; default, choices and help are those declared there."""
    metadata, default = DECLARED[name].metadata, getattr(CONFIG, name)
    flag, meaning = f"--{name.replace('_', '-')}", f"grass: {metadata['meaning']}"
    choices = metadata["range"].choices
    if name == "selection":
        meaning += f" ({', '.join(available_rules())})"
    if isinstance(default, bool):
        add(flag, action="store_true", help=meaning)
    elif choices:
        add(flag, type=_choice, choices=choices, default=default, help=meaning)
    else:
        kind = str if isinstance(default, str) else int if isinstance(default, int) else number
        add(flag, type=kind, default=default, help=meaning)


def _scale(text: str) -> float | None:
    return None if text == "auto" else float(text)


def _choice(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def split_and_path(text: str) -> tuple[str, str]:
    """``SPLIT=GLOB`` as a pair."""
    split, equals, path = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: must be SPLIT=GLOB, such as train=a.jsonl")
    return split, path


def share(text: str) -> int | str:
    """A number of sequences, or ``"auto"``."""
    return text if text == "auto" else int(text)
