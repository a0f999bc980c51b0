"""Command-line flags that the scripts share, and configurations made from them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from grass.command_line import number

AddFlag = Callable[..., Any]
"""``add_argument`` of a parser or of one of its groups."""


def from_flags(cls: type[Any], args: argparse.Namespace, **others: Any) -> Any:
    """A configuration whose fields are the flags of the same names; ``others`` come on top."""
    names = {field.name for field in dataclasses.fields(cls)} & vars(args).keys()
    return cls(**{name: getattr(args, name) for name in names} | others)


def add_optimizer_flags(add: AddFlag) -> None:
    """Hyperparameters of :class:`grass.training.run.optimizers.OptimizerConfig`, all but its name."""
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=0.0, help="decoupled")
    add("--betas", type=float, nargs=2, default=(0.9, 0.999), help="decay rates of the moments")
    add("--rank", type=number, default=0.25, help="an integer, or a fraction of the dimension")
    add("--update-interval", type=int, help="steps between changes of the projection; default: 200")
    add("--scale", type=float, help="of the projected weights' update; default: 1, galore 0.25")
    add("--selection", default="uniform", help="grass: top_r, multinomial_norm, multinomial_norm_sq, uniform")
    add("--replacement", action="store_true", help="grass: draw rows with replacement")
    add(
        "--dim",
        choices=("auto", 0, 1),
        type=lambda text: int(text) if text.isdigit() else text,
        default=1,
        help="grass: rows (0), columns (1), or the smaller dimension",
    )
    add("--state-policy", choices=("reset", "keep", "bank"), default="keep", help="grass: moments at a refresh")
    add("--explore", type=number, help="grass: rows that move without state; default: all others, --compact: as --rank")
    add("--compact", action="store_true", help="grass: never form full gradients; dim auto is then 1")
    add("--moment-dtype", choices=("float32", "bfloat16", "8bit"), default="float32", help="grass: of selected rows")
    add("--bank-dtype", choices=("float32", "bfloat16"), default="float32", help="grass: of the bank")
    add("--shard-bank", action="store_true", help="grass: divide the bank among the processes of DDP")
    add("--stochastic-rounding", action="store_true", help="grass: of updates to half-precision weights")
    add("--active-dtype", choices=("float32", "bfloat16"), help="--compact: of active rows; default: the weights'")
    add("--weights", choices=("int8",), help="--compact: precision of frozen weights; default: --dtype")
    add("--warmup-after-refresh", type=int, default=0, help="grass: steps of warm-up after a refresh")


def split_and_path(text: str) -> tuple[str, str]:
    """``SPLIT=GLOB`` as a pair."""
    split, equals, path = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: must be SPLIT=GLOB, such as train=a.jsonl")
    return split, path
