"""Values a parameter group may take, and what ``rank`` and ``dim`` mean for a given weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor

from grass.selection.exploration import resolve_explore
from grass.selection.rules import check_rule
from grass.state.moments import POLICIES
from grass.state.precision import PRECISIONS


def as_plain(values: dict[str, Any]) -> dict[str, Any]:
    """The same values as a state dict holds them: NumPy's numbers as Python's, dtypes by name."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in values.items()}
    for key in plain.keys() & {"bank_dtype", "moment_dtype"}:
        plain[key] = str(plain[key]).removeprefix("torch.")
    return plain


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """The values of a group that decide what its state looks like and how rows are selected."""
    return {key: group[key] for key in SHARED_KEYS}


def validate(values: dict[str, Any]) -> None:
    """Check those of a group's values that are there, apart from its tensors."""
    for name in _RANGES:  # in this order, whichever of several wrong values is named
        if name in values:
            check_value(name, values[name])
    check_rule(values["selection"], values["replacement"])


def check_value(name: str, value: Any) -> None:
    """Raise ``ValueError``, or ``TypeError``, unless ``value`` is in the range of the hyperparameter ``name``."""
    holds, allowed = _RANGES[name]
    message = f"Invalid {name}={value!r}: must be {allowed}"
    try:
        in_range = holds(value)
    except TypeError:
        raise TypeError(message) from None
    if not in_range:
        raise ValueError(message)


def resolve_dim(dim: int | str, weight: Tensor) -> int:
    """0 or 1 for a matrix ``(m, n)``; ``"auto"`` is the smaller dimension, 0 where both are equal."""
    if dim == "auto":
        return int(weight.shape[0] > weight.shape[1])
    return int(dim)


def resolve_rank(rank: int | float, size: int) -> int:
    """Rows to select of ``size``: ``rank`` itself, or for a float that fraction of them, at least one."""
    return max(1, round(float(rank) * size)) if isinstance(rank, (float, np.floating)) else int(rank)


def explored_count(group: dict[str, Any], rank: int, size: int) -> int:
    """Rows that a weight of dense mode explores in each step: all others unless told otherwise."""
    explore = group["explore"]
    if explore is None:
        explore = 0 if group["replacement"] else 1.0
    return resolve_explore(explore, rank, size)


def is_projected(tensor: Tensor, group: dict[str, Any]) -> bool:
    """Whether a tensor of this group is projected: the group has a rank and the tensor is a matrix, not empty."""
    return group["rank"] is not None and tensor.ndim >= 2 and tensor.numel() > 0


def as_matrix(tensor: Tensor) -> Tensor:
    """A weight or its gradient as ``(shape[0], -1)``: a view but for some layouts of more than two dimensions."""
    return tensor if tensor.ndim == 2 else tensor.reshape(tensor.shape[0], -1)


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and 0 < float(value) <= 1


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _one_of(allowed: Iterable[Any]) -> tuple[Callable[[Any], bool], str]:
    choices = tuple(allowed)
    return lambda v: v in choices, f"one of {', '.join(map(repr, choices))}"


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda v: _is_scalar(v) and bool(0 <= v < math.inf), "a finite number or one-element tensor >= 0"),
    "betas": (lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v), "two numbers in [0, 1)"),
    "eps": (lambda v: 0 <= v < math.inf, "a finite number >= 0"),
    "weight_decay": (lambda v: 0 <= v < math.inf, "a finite number >= 0"),
    "rank": (
        lambda v: v is None or (v >= 1 if _is_int(v) else _is_fraction(v)),
        "an integer >= 1, a fraction in (0, 1], or None",
    ),
    "update_interval": (lambda v: _is_int(v) and v >= 1, "an integer >= 1"),
    "dim": _one_of(("auto", 0, 1)),
    "scale": (lambda v: 0 < v < math.inf, "a finite number > 0"),
    "state_policy": _one_of(POLICIES),
    "warmup_after_refresh": (lambda v: _is_int(v) and v >= 0, "an integer >= 0"),
    "seed": (_is_int, "an integer"),
    "decay": _one_of(("selected", "all")),
    "refresh": _one_of(("sketch", "exact")),
    "sketch_size": (lambda v: _is_int(v) and v >= 1, "an integer >= 1"),
    "explore": (
        lambda v: v is None or (v >= 0 if _is_int(v) else isinstance(v, float) and 0 <= v <= 1),
        "an integer >= 0, a fraction in [0, 1], or None",
    ),
    "bank_dtype": _one_of(("float32", "bfloat16")),
    "shard_bank": _one_of((False, True)),
    "moment_dtype": _one_of(PRECISIONS),
    "stochastic_rounding": _one_of((False, True)),
    "fused": _one_of((None, False, True)),
    "foreach": _one_of((None, False, True)),
    "amsgrad": (lambda v: v is False, "False: rows that are not selected have no second moment to take a maximum of"),
    "capturable": (
        lambda v: v is False,
        "False: a refresh reads gradient norms on the host, which a CUDA graph cannot record",
    ),
    "differentiable": (lambda v: v is False, "False: a step changes weights in place, unseen by autograd"),
}

SHARED_KEYS = (
    *("rank", "dim", "selection", "replacement", "update_interval", "seed", "refresh", "sketch_size"),
    *("state_policy", "explore", "bank_dtype", "shard_bank", "moment_dtype", "stochastic_rounding"),
)
"""What the processes of a distributed run must have alike, or they come apart."""

PAPER = {
    "selection": "top_r",
    "update_interval": 200,
    "dim": "auto",
    "state_policy": "reset",
    "explore": 0,
}
"""Hyperparameters of Muhamed et al. (2024) where :class:`grass.GrassAdamW` has other defaults, which train better."""
