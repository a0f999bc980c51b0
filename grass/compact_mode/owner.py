"""Which optimizer trains a converted layer: there must be one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer


class Owner:
    """A weak reference to the optimizer that trains a layer's active rows; empty in a copied or unpickled layer."""

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __reduce__(self) -> tuple[type[Owner], tuple[()]]:
        return Owner, ()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; ``None`` if there is none or it was deleted."""
        return None if self._optimizer is None else self._optimizer()

    @staticmethod
    def check(layer: CompactLayer, optimizer: Optimizer) -> None:
        """Make ``optimizer`` the owner of a layer without one.

        Raises:
            RuntimeError: another optimizer was built on these active rows later.
        """
        owner = layer.owner.optimizer if layer.owner is not None else None
        if owner is None:
            layer.owner = Owner(optimizer)
        elif owner is not optimizer:
            raise RuntimeError(
                f"The active rows of {layer.label!r} belong to a {type(owner).__name__} that was built later: two "
                "optimizers would choose rows for one layer. Build one, and delete it before you build another"
            )


def wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and all that its attributes hold, also in lists and dicts, as wrappers hold those they step."""
    found: dict[int, Optimizer] = {id(optimizer): optimizer}
    waiting = [optimizer]
    while waiting:
        for value in vars(waiting.pop()).values():
            for inner in _optimizers(value):
                if id(inner) not in found:
                    found[id(inner)] = inner
                    waiting.append(inner)
    return list(found.values())


def _optimizers(value: Any) -> Iterable[Optimizer]:
    if isinstance(value, dict):
        value = list(value.values())
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Optimizer)]
