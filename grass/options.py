"""The hyperparameters of :class:`grass.GrassAdamW`, each declared once, and what they mean for a given weight.

:class:`Options` declares default, allowed values and meaning of each. Validation, the settings that ranks compare, the
scripts' flags and their defaults follow from it. Tests hold the signatures and docstrings of :class:`grass.GrassAdamW`
and :func:`grass.attach` to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from torch import Tensor

from grass.selection.exploration import resolve_explore
from grass.selection.rules import check_rule

POLICIES = ("reset", "keep", "bank")
PRECISIONS = ("float32", "bfloat16", "8bit")


@dataclass(frozen=True)
class Range:
    """The values that a hyperparameter may take.

    Attributes:
        holds: whether a value is one of them; may raise ``TypeError``.
        words: the same in words, for the error message.
        choices: the values if there are few.
    """

    holds: Callable[[Any], bool]
    words: str
    choices: tuple[Any, ...] = ()


def one_of(*choices: Any) -> Range:
    """A range of a few values."""
    return Range(lambda v: v in choices, f"one of {', '.join(map(repr, choices))}", choices)


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and 0 < float(value) <= 1


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


_LR = Range(lambda v: _is_scalar(v) and bool(0 <= v < math.inf), "a finite number or one-element tensor >= 0")
_BETAS = Range(lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v), "two numbers in [0, 1)")
_NOT_NEGATIVE = Range(lambda v: 0 <= v < math.inf, "a finite number >= 0")
_POSITIVE = Range(lambda v: 0 < v < math.inf, "a finite number > 0")
_SCALE = Range(lambda v: v == "auto" or 0 < v < math.inf, "a finite number > 0, or 'auto'")
_INTEGER = Range(_is_int, "an integer")
_COUNT = Range(lambda v: _is_int(v) and v >= 0, "an integer >= 0")
_COUNT_FROM_ONE = Range(lambda v: _is_int(v) and v >= 1, "an integer >= 1")
_FLAG = one_of(False, True)
_FLAG_OR_NONE = one_of(None, False, True)
_RANK = Range(
    lambda v: v is None or (v >= 1 if _is_int(v) else _is_fraction(v)),
    "an integer >= 1, a fraction in (0, 1], or None",
)
_EXPLORE = Range(
    lambda v: v is None or (v >= 0 if _is_int(v) else isinstance(v, float) and 0 <= v <= 1),
    "an integer >= 0, a fraction in [0, 1], or None",
)
_RULE = Range(lambda v: True, "a name in grass.available_rules()")  # check_rule() looks at it and at `replacement`
_ANY = Range(lambda v: True, "True or False")  # its truth value counts
_NO_AMSGRAD, _NOT_CAPTURABLE, _NOT_DIFFERENTIABLE = (
    Range(lambda v: v is False, f"False: {why}")
    for why in (
        "rows that are not selected have no second moment to take a maximum of",
        "a refresh reads gradient norms on the host, which a CUDA graph cannot record",
        "a step changes weights in place, unseen by autograd",
    )
)


def _option(default: Any, values: Range, meaning: str, *, decides: str) -> Any:
    return field(default=default, metadata={"range": values, "meaning": meaning, "decides": decides})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The hyperparameters of one parameter group: a typed view, built once per group and step.

    Each field's metadata holds its ``range`` (:class:`Range`), its ``meaning`` in a few words, and what it ``decides``:
    ``"rows"`` (which rows, and the layout of state), ``"moves"`` (how far rows move), or only ``"speed"``. The
    processes of a distributed run must agree on the first two.
    """

    lr: float | Tensor = _option(1e-3, _LR, "learning rate", decides="moves")  # noqa: RUF009 - a dataclass field
    betas: tuple[float, float] = _option((0.9, 0.999), _BETAS, "decay rates of the moments", decides="moves")
    eps: float = _option(1e-8, _NOT_NEGATIVE, "added to the denominator", decides="moves")
    weight_decay: float = _option(1e-2, _NOT_NEGATIVE, "decoupled decay rate", decides="moves")
    rank: int | float | None = _option(
        None, _RANK, "selected rows per weight: an integer, or a fraction of the dimension", decides="rows"
    )
    update_interval: int = _option(200, _COUNT_FROM_ONE, "steps from one selection to the next", decides="rows")
    selection: str = _option("uniform", _RULE, "rule that selects rows", decides="rows")
    replacement: bool = _option(False, _ANY, "draw rows with replacement", decides="rows")
    dim: int | str = _option(1, one_of("auto", 0, 1), "rows (0), columns (1), or the smaller dimension", decides="rows")
    scale: float | str = _option(
        "auto", _SCALE, "multiplies the update of projected weights; auto: n / (r + q)", decides="moves"
    )
    state_policy: str = _option("keep", one_of(*POLICIES), "what a refresh does to the moments", decides="rows")
    warmup_after_refresh: int = _option(0, _COUNT, "steps of learning-rate warm-up after each refresh", decides="moves")
    seed: int = _option(0, _INTEGER, "seed of the row selection", decides="rows")
    maximize: bool = _option(False, _ANY, "ascend", decides="moves")
    decay: str = _option(
        "selected", one_of("selected", "all"), "what weight_decay decays: selected or all rows", decides="moves"
    )
    refresh: str = _option(
        "sketch", one_of("sketch", "exact"), "gradient norms of compact mode: sketched or exact", decides="rows"
    )
    sketch_size: int = _option(32, _COUNT_FROM_ONE, "columns of the sketch", decides="rows")
    explore: int | float | None = _option(
        None,
        _EXPLORE,
        "rows that move without state in each step; default: all others, in compact mode as many as rank",
        decides="rows",
    )
    experts: bool = _option(
        False, _FLAG, "weights (E, m, n) are matrices of E experts, whose rows are chosen one by one", decides="rows"
    )
    bank_dtype: str = _option("float32", one_of("float32", "bfloat16"), "precision of the bank", decides="rows")
    shard_bank: bool = _option(False, _FLAG, "divide the bank among the processes of DDP", decides="rows")
    moment_dtype: str = _option("float32", one_of(*PRECISIONS), "precision of selected rows' moments", decides="rows")
    stochastic_rounding: bool = _option(False, _FLAG, "round half-precision weights stochastically", decides="rows")
    fused: bool | None = _option(
        None, _FLAG_OR_NONE, "use the compiled CPU kernel; default: if it can be built", decides="speed"
    )
    foreach: bool | None = _option(None, _FLAG_OR_NONE, "use torch's foreach AdamW at full rank", decides="speed")
    amsgrad: bool = _option(False, _NO_AMSGRAD, "not supported", decides="speed")
    capturable: bool = _option(False, _NOT_CAPTURABLE, "not supported", decides="speed")
    differentiable: bool = _option(False, _NOT_DIFFERENTIABLE, "not supported", decides="speed")

    @classmethod
    def of(cls, group: Options | Mapping[str, Any]) -> Options:
        """The view of a parameter group; missing keys have their defaults. Options are returned as they are."""
        if isinstance(group, Options):
            return group
        options = object.__new__(cls)  # the constructor of a frozen dataclass takes five times as long
        options.__dict__.update({name: group.get(name, default) for name, default in DEFAULTS.items()})
        return options

    def projects(self, tensor: Tensor) -> bool:
        """Whether rows of a tensor of this group are selected: the group has a rank, the tensor is a matrix."""
        return is_projected(tensor, vars(self))

    def experts_of(self, tensor: Tensor) -> int:
        """How many matrices a tensor of this group consists of: ``E`` for the weights of experts, else 1."""
        return tensor.shape[0] if self.is_batch(tensor) else 1

    def is_batch(self, tensor: Tensor) -> bool:
        """Whether a tensor of this group is the weight of experts."""
        return is_batch(tensor, vars(self))

    def dim_of(self, tensor: Tensor) -> int:
        """The dimension in which rows of a tensor of this group are selected, as a matrix or as those of experts."""
        return resolve_dim(self.dim, tensor.shape[1:] if self.is_batch(tensor) else as_matrix(tensor).shape)

    def matrix_of(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """The tensor as one matrix; of experts one without values, which has the shape of all beside each other.

        Args:
            tensor: a parameter or its gradient.
            dim: the dimension in which rows are selected, where the tensor is a part that does not tell.
        """
        if not self.is_batch(tensor):
            return as_matrix(tensor)
        shape = list(tensor.shape[1:])
        shape[self.dim_of(tensor) if dim is None else dim] *= tensor.shape[0]
        return tensor.new_empty(()).expand(shape)

    def selected(self, size: int) -> int:
        """How many of ``size`` rows are selected."""
        assert self.rank is not None
        return resolve_rank(self.rank, size)

    def of_strata(self, count: int) -> Options:
        """The options of each of ``count`` strata, which share rank and explored rows (:func:`share`)."""
        shared = {name: share(name, getattr(self, name), count) for name in ("rank", "explore")}
        return Options.of({**vars(self), **shared})

    def explored(self, rank: int, size: int) -> int:
        """How many rows of a weight of dense mode are explored in each step."""
        return explored_count(vars(self), rank, size)


DECLARED = {f.name: f for f in fields(Options)}
"""The fields of :class:`Options` by name."""

DEFAULTS: dict[str, Any] = {name: f.default for name, f in DECLARED.items()}
"""The default of every hyperparameter."""

ROW_KEYS = tuple(name for name, f in DECLARED.items() if f.metadata["decides"] == "rows")
"""Settings that decide rows and the layout of state."""

SPEED_KEYS = tuple(name for name, f in DECLARED.items() if f.metadata["decides"] == "speed")
"""Settings that decide how a step is computed, and those that are not supported."""

SHARED_KEYS = tuple(name for name in DECLARED if name not in SPEED_KEYS)
"""Settings that the processes of a distributed run must agree on: those that decide what a step does."""

LASTING_KEYS = tuple(name for name in SHARED_KEYS if name not in ("lr", "betas"))
"""Of these, the settings that no schedule changes: loading says which of them saved ones replace."""

PAPER = {
    "selection": "top_r",
    "update_interval": 200,
    "dim": "auto",
    "state_policy": "reset",
    "explore": 0,
}
"""Hyperparameters of Muhamed et al. (2024) where :class:`grass.GrassAdamW` has other defaults, which train better."""


def as_plain(values: dict[str, Any]) -> dict[str, Any]:
    """The same values as a state dict holds them: NumPy's numbers as Python's, dtypes by name."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in values.items()}
    for key in plain.keys() & {"bank_dtype", "moment_dtype"}:
        plain[key] = str(plain[key]).removeprefix("torch.")
    return plain


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """The values of a group that decide what its state looks like and how rows are selected."""
    return {key: group[key] for key in ROW_KEYS}


def declared_settings(group: dict[str, Any]) -> dict[str, Any]:
    """The values of a group as far as they are declared here, without the learning rate, which schedules change."""
    return {key: group[key] for key in DECLARED if key != "lr"}


def shared_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group that processes must agree on; numbers as such, whatever type holds them."""
    return {key: as_number(group[key]) for key in SHARED_KEYS}


def as_number(value: Any) -> Any:
    """A number that NumPy or a tensor of one element holds, as Python's; any other value as it is, lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(map(as_number, value))
    is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    return value.item() if is_number else value


def validate(values: dict[str, Any]) -> None:
    """Check the values of a group, apart from its tensors. Of several wrong values the first declared one is named."""
    for name in DECLARED:
        if name in values:
            check_value(name, values[name])
    check_rule(values["selection"], values["replacement"])


def check_value(name: str, value: Any) -> None:
    """Raise ``ValueError``, or ``TypeError``, unless ``value`` is in the range of the hyperparameter ``name``."""
    allowed: Range = DECLARED[name].metadata["range"]
    message = f"Invalid {name}={value!r}: must be {allowed.words}"
    try:
        in_range = allowed.holds(value)
    except TypeError:
        raise TypeError(message) from None
    if not in_range:
        raise ValueError(message)


def resolve_dim(dim: int | str, shape: Sequence[int]) -> int:
    """0 or 1 for a matrix of a shape ``(m, n)``; ``"auto"`` is the smaller dimension, 0 if both are equal."""
    if dim == "auto":
        return int(shape[0] > shape[1])
    return int(dim)


def resolve_rank(rank: int | float, size: int) -> int:
    """How many of ``size`` rows to select: ``rank``, or if it is a float that fraction of them, at least one."""
    return max(1, round(float(rank) * size)) if isinstance(rank, (float, np.floating)) else int(rank)


Count = int | float | None
"""``rank`` or ``explore``, as the user gives it."""


def share(name: str, value: Count, strata: int) -> Count:
    """The part of a count that each of the strata has; a fraction stays."""
    if strata == 1 or value is None or isinstance(value, (float, np.floating)):
        return value
    if value % strata:
        raise ValueError(
            f"Invalid {name}={value}: must be a multiple of the {strata} strata of ranks, which select equally many "
            "rows, or a fraction"
        )
    return value // strata


def explored_count(group: Mapping[str, Any], rank: int, size: int) -> int:
    """:meth:`Options.explored` of a parameter group: all rows that are not selected unless told otherwise.

    With replacement the default is none.
    """
    explore = group["explore"]
    if explore is None:
        explore = 0 if group["replacement"] else 1.0
    return resolve_explore(explore, rank, size)


def parameter_names(group: Mapping[str, Any], first: int) -> list[str]:
    """What to call a group's parameters: as they were named, or by their positions.

    Names do not count where parameters were put into the group or taken out by hand: they may be those of others.

    Args:
        group: of an optimizer.
        first: position of its first parameter among all of the optimizer.
    """
    names, count = group.get("param_names", ()), len(group["params"])
    return list(map(str, names)) if len(names) == count else [f"parameter {first + i}" for i in range(count)]


def is_projected(tensor: Tensor, group: Mapping[str, Any]) -> bool:
    """:meth:`Options.projects` of a parameter group."""
    return group["rank"] is not None and tensor.ndim >= 2 and tensor.numel() > 0


def is_batch(tensor: Tensor, group: Mapping[str, Any]) -> bool:
    """:meth:`Options.is_batch` of a parameter group."""
    return bool(group.get("experts")) and tensor.ndim == 3


def as_matrix(tensor: Tensor) -> Tensor:
    """A weight or its gradient as ``(shape[0], -1)``; a copy for some layouts of more than two dimensions."""
    return tensor if tensor.ndim == 2 else tensor.reshape(tensor.shape[0], -1)
