"""Plain linear layers that must not be converted, and the reasons.

An enclosing module may read the weight itself instead of calling the layer, as ``self.proj.weight @ x`` in Mamba.
The active rows would then get no gradient. The matrices of a PEFT adapter are small and train at full rank.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

INITIALISERS = frozenset({"__init__", "_init_weights", "reset_parameters", "_reset_parameters", "extra_repr"})
"""Methods that read weights without computing with them."""

PROPERTIES = frozenset({"dtype", "device", "shape", "size", "ndim", "dim", "requires_grad", "is_cuda", "numel"})
"""Attributes of a weight that may be read without computing with it."""


def left_alone(model: nn.Module) -> dict[str, str]:
    """Map the name of each layer that must not be converted to the reason.

    The source of the enclosing module's class is searched for ``self.<layer>.weight`` outside of initialisers. Reading
    its dtype, device or shape does not count. A module without source is assumed to call its layers.
    """
    found = {}
    for name, parent in model.named_modules():
        prefix = f"{name}." if name else ""
        for child in _weights_read_by(type(parent)):  # type: ignore[arg-type]
            if isinstance(getattr(parent, child, None), nn.Module):
                found[prefix + child] = f"{type(parent).__name__} reads its weight without calling it"
        if type(parent).__module__.startswith("peft.tuners.") and hasattr(parent, "base_layer"):
            inner = (child for child, _ in parent.named_modules() if child and child.split(".")[0] != "base_layer")
            found.update((prefix + child, "it is part of a PEFT adapter") for child in inner)
    return found


@functools.cache
def _weights_read_by(cls: Any) -> frozenset[str]:
    if cls.__module__.startswith("torch."):
        return frozenset()  # their fast paths read weights in inference only
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name not in INITIALISERS]
    return frozenset(child for method in methods for child in _weights_read_in(method))


def _weights_read_in(method: ast.FunctionDef) -> Iterator[str]:
    """The names ``x`` for which a method reads ``self.x.weight`` as a value."""
    ignored: set[ast.AST] = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and node.attr in PROPERTIES:
            ignored.add(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "hasattr"):
            ignored.update(node.args)
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "weight"
            and isinstance(node.ctx, ast.Load)
            and node not in ignored
            and isinstance(node.value, ast.Attribute)
            and isinstance(node.value.value, ast.Name)
            and node.value.value.id == "self"
        ):
            yield node.value.attr
