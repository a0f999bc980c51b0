"""The converted counterpart of each class of linear layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from grass.compact_mode.layer import CompactLayer, CompactLinear
from grass.parallel.shards import is_tensor_parallel

COUNTERPARTS: dict[type[nn.Module], type[CompactLayer]] = {}
"""Classes of linear layers that other parts of the package add, with their converted counterparts."""

_REGISTERED: set[type[nn.Linear]] = set()
"""What :func:`register_linear` was given."""

_KNOWN = {("transformers.models.falcon.modeling_falcon", "FalconLinear")}
"""Classes of other packages whose own ``forward`` is that of a linear layer, by module and name."""


def register_linear(cls: type[nn.Linear]) -> type[nn.Linear]:
    """Let :func:`grass.compact` convert layers of a class that has a ``forward`` of its own. A decorator, or a call.

    Subclasses of ``nn.Linear`` that inherit its ``forward`` are converted without this.

    Args:
        cls: a subclass of ``nn.Linear`` whose ``forward(x)`` is ``x W^T + b`` of its ``weight`` and ``bias``, whatever
            else it does that needs no gradient. Converted layers call it where no gradient is recorded; elsewhere
            they compute ``x W^T + b`` themselves.

    Returns:
        The class.

    Raises:
        TypeError: it is no subclass of ``nn.Linear``.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Linear)):
        raise TypeError(f"Invalid cls={cls!r}: must be a subclass of nn.Linear")
    _REGISTERED.add(cls)
    return cls


def compact_class(module: nn.Module) -> type[CompactLayer] | None:
    """The converted counterpart of a module's class; ``None`` if there is none."""
    cls: Any = type(module)
    if cls in COUNTERPARTS:
        return COUNTERPARTS[cls]
    base: Any = _base(module)
    if cls is nn.Linear:
        plain: type[CompactLayer] = base
        return plain
    if issubclass(cls, nn.Linear) and not issubclass(cls, nn.LazyLinear) and _computes_as_linear(cls):
        derived: type[CompactLayer] = _derived(base, cls)
        return derived
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        from grass.compact_mode.conv1d import CompactConv1D

        return CompactConv1D
    return None


def taken_names(module: nn.Module, attributes: Iterable[str]) -> list[str]:
    """What a layer or its class has of its own under names that its converted counterpart uses.

    Args:
        module: a layer that :func:`compact_class` has a counterpart of.
        attributes: what the conversion sets, beside what the counterpart's class has.
    """
    if type(module) in COUNTERPARTS:
        return []
    ours = {*dir(CompactLayer), *attributes, "active", "chosen"} - set(dir(nn.Linear))
    held = {*vars(module), *module._parameters, *module._buffers, *module._modules, *dir(type(module))}
    return sorted(name for name in ours & held if not name.startswith("__"))


def _base(module: nn.Module) -> type[CompactLayer]:
    """The counterpart of a plain linear layer, by where its weight is stored."""
    if is_tensor_parallel(module):
        from grass.compact_mode.tensor_parallel import TensorParallelLinear  # torch.distributed may not be there

        return TensorParallelLinear
    return CompactLinear


def _computes_as_linear(cls: type[nn.Linear]) -> bool:
    """Whether layers of a class compute what ``nn.Linear`` does."""
    inherits = cls.forward is nn.Linear.forward and cls.__call__ is nn.Linear.__call__
    return inherits or cls in _REGISTERED or (cls.__module__, cls.__name__) in _KNOWN


class _Derived(nn.Module):
    """What a class that :func:`_derived` makes adds: copies and pickles find it again, though no module holds it."""

    derived_from: tuple[Any, Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _empty, self.derived_from, *reduced[2:]


@functools.cache
def _derived(base: Any, cls: Any) -> Any:
    """The counterpart of a subclass ``cls`` of ``nn.Linear``, which keeps what ``cls`` adds."""
    own = {"plain_class": cls, "derived_from": (base, cls), "__module__": cls.__module__}
    return type(f"Compact{cls.__name__}", (_Derived, base, cls), own)


def _empty(base: Any, cls: Any) -> Any:
    """An empty layer of a derived class, which a copy or a pickle fills."""
    kind = _derived(base, cls)
    return kind.__new__(kind)
