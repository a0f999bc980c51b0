"""Layers that must not be converted, and the reasons; models whose conversion comes too late.

An enclosing module may read the weight itself instead of calling the layer, as ``self.proj.weight @ x`` in Mamba.
The active rows would then get no gradient. The matrices of a PEFT adapter are small and train at full rank.

Source shows the plain cases. :mod:`grass.compact_mode.reads` finds the others in the first steps of the training.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from grass.parallel.ddp import are_wrapped
from grass.parallel.shards import is_sharded, is_tensor_parallel, shard_dim
from grass.private_names import gradient_hooks

PROPERTIES = frozenset({"dtype", "device", "shape", "size", "ndim", "dim", "requires_grad", "is_cuda", "numel"})
"""Attributes of a weight that may be read without computing with it."""

UNKNOWN = object()
"""The value of a condition that needs more than the module to be known."""


def unconvertible(model: nn.Module) -> dict[str, str]:
    """Map the name of each layer that must not be converted to the reason.

    The source of the enclosing module's ``forward``, and of its methods that ``forward`` names, is searched for
    ``self.<layer>.weight``. Reading its dtype, device or shape does not count. Branches do not count if their
    condition reads only attributes of the module and is false now. A layer that several modules hold has its first
    name.
    """
    found, first = {}, {module: name for name, module in model.named_modules()}
    for name, parent in model.named_modules():
        advice = ", so convert modules that call their projections" if type(parent) is nn.MultiheadAttention else ""
        for path in _weights_read_by(parent):
            read = f"{name}.{path}" if name else path
            reason = f"{type(parent).__name__} reads its weight without calling it{advice}"
            found[first.get(_module_at(parent, path), read)] = reason
    hooked = (name for name, module in model.named_modules() if _has_hooks(module))
    found |= dict.fromkeys(hooked, "its weight has gradient hooks, which would not be called any more")
    return found | dict.fromkeys(adapters(model), "it is part of a PEFT adapter")


def _module_at(parent: nn.Module, path: str) -> Any:
    """The module at a path from its parent; ``None`` where there is none, as behind a property."""
    try:
        return parent.get_submodule(path)
    except AttributeError:
        return None


def _has_hooks(module: nn.Module) -> bool:
    """Whether a plain layer's weight has hooks of ``register_hook`` or ``register_post_accumulate_grad_hook``."""
    weight = module._parameters.get("weight")
    return weight is not None and "active" not in module._parameters and bool(gradient_hooks(weight))


def adapters(model: nn.Module) -> set[str]:
    """Names of the modules that adapters of PEFT consist of."""
    found: set[str] = set()
    for name, parent in model.named_modules():
        if type(parent).__module__.startswith("peft.tuners.") and hasattr(parent, "base_layer"):
            prefix = f"{name}." if name else ""
            inner = (child for child, _ in parent.named_modules() if child and child.split(".")[0] != "base_layer")
            found.update(prefix + child for child in inner)
    return found


def _weights_read_by(module: nn.Module) -> set[str]:
    """The paths ``x`` or ``x.y`` of modules in ``module`` whose weights its forward reads as values."""
    if isinstance(module, nn.MultiheadAttention):
        return {"out_proj"}
    found, waiting, seen = set(), ["forward"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for tree in _definitions(type(module), name):
            for path in _paths_of_self(module, tree, _name_of_self(tree)):
                names = path.split(".")
                if "weight" in names[1:]:
                    found.add(".".join(names[: names.index("weight", 1)]))
                waiting.append(names[0])
    return found


def _definitions(cls: Any, name: str) -> Iterator[ast.AST]:
    """The source of a method or property in a class and its bases, apart from those of torch."""
    for base in cls.__mro__:
        if name in vars(base) and not base.__module__.startswith("torch."):
            member = vars(base)[name]
            yield from _parsed(getattr(member, "fget", None) or getattr(member, "__func__", member))


@functools.cache
def _parsed(function: Any) -> tuple[ast.AST, ...]:
    """The syntax tree of a function; none without source."""
    try:
        return (ast.parse(textwrap.dedent(inspect.getsource(function))),)
    except (OSError, TypeError, SyntaxError):
        return ()


def _name_of_self(tree: ast.AST) -> str:
    """What a method calls its module, mostly ``self``: its first argument."""
    arguments = next((node.args for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))), None)
    names = [] if arguments is None else [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    return names[0] if names else "self"


def _paths_of_self(module: nn.Module, node: ast.AST, own: str) -> Iterator[str]:
    """The paths ``a.b.c`` of all ``self.a.b.c`` that running the code may read as values; ``own`` is its ``self``."""
    if isinstance(node, (ast.If, ast.IfExp)) and (value := _value(module, node.test, own)) is not UNKNOWN:
        taken: Any = node.body if value else node.orelse
        for part in taken if isinstance(taken, list) else [taken]:
            yield from _paths_of_self(module, part, own)
        return
    if isinstance(node, ast.Attribute):
        if node.attr in PROPERTIES and isinstance(node.value, ast.Attribute) and node.value.attr == "weight":
            return
        if isinstance(node.ctx, ast.Load) and (path := _path_of_self(node, own)):
            yield path
            return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "hasattr"):
        return
    for child in ast.iter_child_nodes(node):
        yield from _paths_of_self(module, child, own)


def _path_of_self(node: ast.AST, own: str) -> str:
    """``a.b.c`` for the expression ``self.a.b.c``; empty for others."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join(names) if isinstance(node, ast.Name) and node.id == own else ""


def _value(module: nn.Module, condition: ast.expr, own: str) -> Any:
    """What a condition on attributes of a module is now; ``UNKNOWN`` if it reads the mode or more than attributes."""
    plain = (ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.Compare, ast.cmpop, ast.Constant, ast.Attribute)
    for node in ast.walk(condition):
        known = isinstance(node, (*plain, ast.Load)) or (isinstance(node, ast.Name) and node.id == own)
        if not known or getattr(node, "attr", "") == "training":
            return UNKNOWN
    try:
        return bool(eval(compile(ast.Expression(condition), "<condition>", "eval"), {own: module}))
    except Exception:  # whatever the module's own attributes raise
        return UNKNOWN


def check_not_wrapped(model: nn.Module) -> None:
    """Refuse a model that DDP has wrapped, as Lightning does before it calls ``configure_optimizers``.

    Raises:
        RuntimeError: a ``DistributedDataParallel`` alive holds parameters of the model.
    """
    if are_wrapped([p for p in model.parameters() if p.requires_grad]):
        raise RuntimeError(
            "Too late to convert: DistributedDataParallel has wrapped this model and would not reduce the gradients of "
            "the active rows. Call grass.compact() before; in Lightning, in the module's __init__ or configure_model"
        )


def check_not_lazy(model: nn.Module) -> None:
    """Refuse a model whose weights have no shape yet, as those of ``nn.LazyLinear``.

    Raises:
        ValueError: names the first of them.
    """
    if (name := next((name for name, p in model.named_parameters() if is_lazy(p)), None)) is not None:
        raise ValueError(f"{name!r} has no shape yet: run one forward before grass.compact()")


def check_not_sharded(layers: dict[str, Any]) -> None:
    """Refuse layers whose weights are sharded already, unless they are converted or their class says what divides them.

    Raises:
        ValueError: ``parallelize_module`` has placed one in a way that is not supported.
        RuntimeError: ``fully_shard`` has sharded one.
    """
    for name, layer in layers.items():
        if is_tensor_parallel(layer) and layer.weight.device_mesh.ndim == 1:
            _check_split(name, layer.weight)
        elif is_sharded(layer.weight) and not hasattr(layer, "divided_by"):
            raise RuntimeError(
                f"Too late to convert {name!r}: its weight is sharded, as {layer.weight.placements}. Call "
                "grass.compact() before fully_shard; tensor parallelism has to be torch's parallelize_module, not "
                "transformers' tp_plan"
            )


def _check_split(name: str, weight: Any) -> None:
    """Refuse a weight that ranks do not have equal parts of."""
    (placement,), (ranks,) = weight.placements, weight.device_mesh.shape
    dim = shard_dim(placement)
    if dim is None:
        raise ValueError(
            f"The weight of {name!r} is placed as {placement!r}: compact mode takes Shard(0), as of ColwiseParallel, "
            "or Shard(1), as of RowwiseParallel; leave other layers out by exclude="
        )
    if weight.shape[dim] % ranks:
        raise ValueError(
            f"The weight of {name!r} of shape {tuple(weight.shape)} is placed as {placement!r}, which {ranks} ranks do "
            f"not share evenly: compact mode needs a multiple of {ranks}; leave the layer out by exclude="
        )
