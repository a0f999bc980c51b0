"""What another optimizer remembers of active rows: which tensors are theirs, and which it cannot exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer
from grass.parallel.shards import local
from grass.state.schema import State

NEAR = 0.3
"""A state this near to the rows, relative to their norm, is a copy of them; the gradient is farther."""


class RowState:
    """An optimizer's state of active rows.

    Args:
        optimizer: any of ``torch.optim``, or of another library.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._checked: set[int] = set()

    def tensors(self, layer: CompactLayer) -> list[Tensor]:
        """This rank's part of the state tensors that have an entry, or as many as it has, for each row.

        A vector with an entry for each row, as of a factored second moment, is a matrix whose rows have one entry.
        """
        return [value for _, value in self._named(layer)]

    def empty(self, layer: CompactLayer) -> float:
        """What rows begin with: zero, or the ``initial_accumulator_value`` of Adagrad."""
        return float(group_of(self._optimizer, layer).get("initial_accumulator_value", 0.0))

    def check(self, layer: CompactLayer) -> None:
        """Refuse state whose rows cannot be exchanged, once, after a layer's first step.

        Raises:
            ValueError: it is in codes whose scales are shared by blocks of rows, a copy of the rows themselves, a
                matrix that mixes rows, or in another form than a tensor with an entry, or as many, for each row.
        """
        state = self._optimizer.state.get(layer.active)
        if not state or id(layer) in self._checked or isinstance(self._optimizer, torch.optim.LBFGS):
            return  # LBFGS begins anew with new rows
        self._checked.add(id(layer))
        known = {name for name, _ in self._named(layer)}  # refuses codes
        rows, grad = layer.rows(), layer.active.grad
        values = {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}
        copies = [name for name, value in values.items() if _is_copy(value, rows)]
        if grad is not None and _is_copy(local(grad), rows):  # so the momentum of a first step is no copy
            copies = []
        mixing = [name for name, value in state.items() if _mixes_rows(value, layer)]
        hidden = [name for name, value in state.items() if name not in known and _hides_rows(value, layer)]
        for names, what in (
            (copies, "a copy of active rows"),
            (mixing, "a matrix over active rows"),
            (hidden, "with more than an entry for each active row"),
        ):
            if names:
                raise ValueError(
                    f"{type(self._optimizer).__name__} holds {names[0]!r}, {what}, which other rows cannot take over: "
                    "attach() is for optimizers whose state is moments. Take another, GrassAdamW or GrassMuon"
                )

    def _named(self, layer: CompactLayer) -> Iterator[tuple[str, Tensor]]:
        length, others = _lengths(layer.active, layer)
        for name, value in self._optimizer.state.get(layer.active, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.ndim == 1 and len(value) == length and (length != others or _is_of_rows(name, layer)):
                value = value.unsqueeze(1 - layer.dim)
            if value.ndim == 2 and _lengths(value, layer) in {(length, others), (length, 1)}:
                yield name, self._exchangeable(name, local(value))

    def _exchangeable(self, name: str, state: Tensor) -> Tensor:
        """State whose elements are numbers, and no codes.

        Raises:
            ValueError: they are codes.
        """
        if state.is_floating_point() and not hasattr(state, "__tensor_flatten__"):
            return state
        raise ValueError(
            f"{type(self._optimizer).__name__} holds {name!r} of active rows as {type(state).__name__} of "
            f"{state.dtype}, whose rows cannot be exchanged: train them with GrassAdamW(model, moment_dtype='8bit')"
        )


def group_of(optimizer: Optimizer, layer: CompactLayer) -> dict[str, Any]:
    """The optimizer's group that holds a layer's active rows."""
    return next(g for g in optimizer.param_groups if any(p is layer.active for p in g["params"]))


def is_called(optimizer: Optimizer, *names: str) -> bool:
    """Whether the class of an optimizer, or one that it derives from, has one of these names in its own."""
    own = [cls.__name__.lower() for cls in type(optimizer).__mro__]
    return any(name.lower() in each for name in names for each in own)


def begin_variances(state: State, layer: CompactLayer) -> None:
    """Give rows without a second moment in Adafactor's state that of their gradient: its averages know no ages.

    The state is torch's, or that of the class of this name in transformers, whose factors are vectors.
    """
    names = (("row_var", "exp_avg_sq_row"), ("col_var", "exp_avg_sq_col"))[layer.dim]
    variances, grad = next((state[name] for name in names if name in state), None), layer.active.grad
    if variances is not None and grad is not None:
        squares = grad.square().mean(1 - layer.dim).view(variances.shape)
        variances.copy_(torch.where(variances == 0, squares, variances))


def _is_copy(state: Tensor, rows: Tensor) -> bool:
    """Whether a state is a copy of rows, or was one before the step; or of every k-th element, as Prodigy's."""
    if state.shape != rows.shape:
        if state.ndim != 1 or not 1 < len(state) <= rows.numel():
            return False
        rows = rows.flatten()[:: math.ceil(rows.numel() / len(state))]
    return state.shape == rows.shape and bool((state - rows).norm() < NEAR * rows.norm())


def _mixes_rows(value: Any, layer: CompactLayer) -> bool:
    """Whether a state holds a matrix with a row and a column for each active row, as a preconditioner is."""
    length, others = _lengths(layer.active, layer)
    may_be_moments = isinstance(value, Tensor) and length == others
    return not may_be_moments and any(getattr(each, "shape", None) == (length, length) for each in _parts_of(value))


def _hides_rows(value: Any, layer: CompactLayer) -> bool:
    """Whether a state that is not exchanged may have entries of active rows: stacked, in a container or an object."""
    length, others = _lengths(layer.active, layer)
    tensors = [each for each in _parts_of(value) if isinstance(each, Tensor)]
    return any(each.numel() >= layer.active.numel() or (length != others and length in each.shape) for each in tensors)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (Tensor, str)) or not isinstance(value, Iterable):
        return (value, *getattr(value, "__dict__", {}).values())
    return value.values() if isinstance(value, dict) else value


def _lengths(matrix: Tensor, layer: CompactLayer) -> tuple[int, int]:
    """How many rows of the layer's kind a matrix has, and how long they are."""
    return matrix.shape[layer.dim], matrix.shape[1 - layer.dim]


def _is_of_rows(name: str, layer: CompactLayer) -> bool:
    """Whether a vector of a square matrix's state has an entry for each of the layer's rows, by its name."""
    return ("row", "col")[layer.dim] in name
