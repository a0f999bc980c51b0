"""Units: the parts of a model that visit the device one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

SHARE = 1 / 8
"""Share of the parameters from which a list of modules is taken for units."""


def find_units(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """The units of a model by name, in order.

    Args:
        model: the model.
        names: names of modules, or of lists of modules, whose items are units. ``None``: the outermost
            ``ModuleList`` or ``Sequential`` that hold at least an eighth of the parameters each.

    Raises:
        TypeError: names are not strings.
        ValueError: a name is not that of a module, units lie in each other, or there are none.
    """
    if names is None:
        found = dict(_from_large_lists(model))
    else:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"Invalid units={names!r}: must be names of modules")
        found = dict(item for name in names for item in _named(model, name))
    if not found and names is not None:
        raise ValueError("Invalid units=[]: must name at least one module")
    if not found:
        raise ValueError(
            "No list of modules holds an eighth of the parameters: name the modules that shall visit the device one "
            "by one with units="
        )
    parts = [part for unit in found.values() for part in unit.modules()]
    if len(parts) != len(set(parts)):
        raise ValueError("Units must not lie in each other or share modules: name others with units=")
    return found


def _from_large_lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    total = _count(model)
    for prefix, modules in _outermost_lists("", model):
        if total and _count(modules) >= SHARE * total:
            yield from _items(prefix, modules)


def _outermost_lists(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists. Where one item of a list holds most of its parameters, the lists in that item."""
    inside = [
        found
        for name, child in module.named_children()
        for found in _outermost_lists(f"{prefix}.{name}" if prefix else name, child)
    ]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    if is_list and not (inside and 2 * max(map(_count, module.children())) > _count(module)):
        yield prefix, module
    else:
        yield from inside


def _named(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"Invalid unit {name!r}: the model has no such module") from error
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from _items(name, module)
    else:
        yield name, module


def _items(prefix: str, modules: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in modules.named_children():
        if any(True for _ in child.parameters()):
            yield f"{prefix}.{name}" if prefix else name, child


def _count(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())
