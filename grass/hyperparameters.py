"""Values a parameter group may take, and what ``rank`` and ``dim`` mean for a given weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grass.exploration import resolve_explore
from grass.layers import CompactLayer
from grass.moments import POLICIES
from grass.precision import PRECISIONS
from grass.selection import check_rule


def as_plain(values: dict[str, Any]) -> dict[str, Any]:
    """The same values as a state dict holds them: NumPy's numbers as Python's, dtypes by name."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in values.items()}
    for key in plain.keys() & {"bank_dtype", "moment_dtype"}:
        plain[key] = str(plain[key]).removeprefix("torch.")
    return plain


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """The values of a group that decide what its state looks like and how rows are selected."""
    return {key: group[key] for key in SHARED_KEYS}


def check_changed(group: dict[str, Any], before: dict[str, Any], has_state: bool) -> None:
    """Check the settings of a group after the user has changed some of them.

    Args:
        group: the group as it is.
        before: its settings when they were last checked.
        has_state: whether one of its parameters has been stepped.

    Raises:
        ValueError: ``rank`` or ``dim`` of a group with state was changed.
    """
    for key in ("rank", "dim"):
        if has_state and group[key] != before[key]:
            raise ValueError(
                f"Invalid {key}={group[key]!r}: must stay {before[key]!r} because this group has state of that {key}; "
                "build a new optimizer to train with another"
            )


def validate_group(group: dict[str, Any], layers: dict[int, CompactLayer]) -> None:
    """Check a group's values, and its ``rank`` against each of its tensors, active rows of ``layers`` by their ``id``.

    Raises:
        TypeError: a tensor is complex, or a value of the wrong type.
        ValueError: a value is out of range; the message names value and range.
    """
    validate(group)
    if group["stochastic_rounding"] and group["replacement"]:
        raise ValueError(
            "stochastic_rounding=True takes replacement=False: rows that repeat are added up in the weight's precision"
        )
    if group["explore"] and group["replacement"]:
        raise ValueError(f"explore={group['explore']!r} takes replacement=False: scaled rows have no complement")
    if group["fused"] and group["foreach"]:
        raise ValueError("`fused` and `foreach` cannot be `True` together: got fused=True, foreach=True")
    if group["shard_bank"] and group["state_policy"] != "bank":
        raise ValueError(f"shard_bank=True takes state_policy='bank', got {group['state_policy']!r}")
    for tensor in tensors_of(group["params"]):
        if id(tensor) in layers:
            _check_active(layers[id(tensor)], group)
        else:
            _check_tensor(tensor, group)


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


def _check_tensor(tensor: Tensor, group: dict[str, Any]) -> None:
    if tensor.is_complex():
        raise TypeError(f"GrassAdamW takes real tensors, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if not is_projected(tensor, group):
        return
    matrix = torch.empty(tensor.shape, device="meta").flatten(1)
    size = matrix.shape[resolve_dim(group["dim"], matrix)]
    rank = resolve_rank(group["rank"], size)
    if rank > size:
        raise ValueError(
            f"Invalid rank={rank}: must be at most {size}, the selected dimension of the weight of shape "
            f"{tuple(tensor.shape)}; lower it, give it as a fraction, or put this weight into a group with rank=None"
        )
    if rank + (explored := explored_count(group, rank, size)) > size:
        raise ValueError(
            f"Invalid explore={explored}: must be at most {size - rank}, the rows of the weight of shape "
            f"{tuple(tensor.shape)} that are not selected, or a fraction, which is cut to that"
        )


def _check_active(layer: CompactLayer, group: dict[str, Any]) -> None:
    size, count = layer.shape[layer.dim], layer.explored.numel()
    if group["replacement"]:
        raise ValueError("Compact mode takes replacement=False: active rows are neither scaled nor repeated")
    rank, explore = group["rank"], group["explore"]
    if rank is not None and resolve_rank(rank, size) != layer.rank:
        raise ValueError(
            f"Invalid {rank=}: must be None or {layer.rank}, which grass.compact() gave the layers already; "
            "to train more or fewer rows, convert with another rank"
        )
    if explore is not None and resolve_explore(explore, layer.rank, size) != count:
        raise ValueError(
            f"Invalid {explore=}: must be None or {count}, which grass.compact() gave the layers already; "
            "to explore more or fewer rows, convert with another explore"
        )


def tensors_of(params: Any) -> list[Tensor]:
    """The tensors of a group; what is neither a tensor nor a named one is left for torch's own check to refuse."""
    items = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
    return [p for p in items if isinstance(p, Tensor)]


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
