"""Find layers whose weight the enclosing module reads itself, as ``self.proj.weight @ x`` in Mamba.

Such a layer is never called, or not always. Converted, its active rows would get no gradient there.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn

INITIALISERS = frozenset({"__init__", "_init_weights", "reset_parameters", "_reset_parameters", "extra_repr"})
"""Methods that read weights without computing with them."""

PROPERTIES = frozenset({"dtype", "device", "shape", "size", "ndim", "dim", "requires_grad", "is_cuda", "numel"})
"""Attributes of a weight whose use is no computation."""


def weights_read_directly(model: nn.Module) -> dict[str, str]:
    """Map the name of each layer whose ``weight`` its parent's methods read to the parent's class name.

    The parent's source is searched for ``self.<layer>.weight`` outside of initialisers; reading its dtype, device or
    shape does not count. Parents without source are taken to call their layers.
    """
    found = {}
    for name, parent in model.named_modules():
        for child in _weights_read_by(type(parent)):
            if isinstance(getattr(parent, child, None), nn.Module):
                found[f"{name}.{child}" if name else child] = type(parent).__name__
    return found


@functools.cache
def _weights_read_by(cls: type[nn.Module]) -> frozenset[str]:
    if cls.__module__.startswith("torch."):
        return frozenset()  # their fast paths read weights in inference only
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name not in INITIALISERS]
    return frozenset(child for method in methods for child in _weights_read_in(method))


def _weights_read_in(method: ast.FunctionDef) -> Iterator[str]:
    """Names ``x`` of which a method reads ``self.x.weight`` as a value."""
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
