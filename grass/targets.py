"""Which weights Grass trains by rows: target patterns in, names of layers out."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator

from torch import Tensor, nn

from grass.coverage import EXPERT_ROWS, report
from grass.private_names import has_gate_of_experts

logger = logging.getLogger("grass")

HEAD_NAMES = frozenset({"lm_head", "embed_out", "output", "head", "score", "classifier", "qa_outputs"})
"""A module is an output head if its name ends in one of these, or if ``get_output_embeddings()`` returns it."""

Targets = str | Iterable[str] | None


def report_coverage(model: nn.Module, verb: str, covered: Collection[str]) -> None:
    """Report the share of a model that Grass trains by rows; ``covered`` has the names of its linear layers."""
    heads = set(_head_names(model))
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    kinds = {name: "output head" if name in heads else "linear" for name in linear}
    report(model, verb, covered, kinds | dict.fromkeys(matched_experts(model), "experts"))


def matched_modules(
    model: nn.Module, targets: Targets = None, exclude: Targets = (), *, may_be_none: bool = False
) -> list[str]:
    """Names of the linear layers that ``targets`` picks and ``exclude`` does not.

    ``None`` and ``"all-linear"`` pick every linear layer except output heads and layers whose weight is shared with
    another module (tied embeddings). Any other string is a regular expression for the whole module name. A list picks
    modules whose name is, or ends in, one of its entries (``["q_proj", "mlp.down_proj"]``) or matches it as a regular
    expression. ``targets`` can pick heads by name, but never shared weights. A module that several others hold is known
    by each of its names, and returned by the first.

    Raises:
        ValueError: nothing matches, or one entry of the list ``targets`` does not.
    """
    by_default = targets is None or targets == "all-linear"
    heads = set(_head_names(model)) if by_default else set()
    shared = _shared_weights(model)
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    names = names_of_each(model)
    matched = [
        first
        for first, module in linear.items()
        if not any(name in heads or names_match(name, exclude) for name in names[module])
        and (by_default or any(names_match(name, targets) for name in names[module]))
    ]
    reasons = {name: _not_its_own(linear[name], shared) for name in matched}
    own = [name for name in matched if reasons[name] is None]
    for name in matched:
        if name not in own:
            logger.warning("Grass passes over %r: its weight is %s", name, reasons[name])
    if not own and not may_be_none:
        known = [*linear, *matched_experts(model)]
        listed = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        reason = "match only layers with shared, computed or empty weights" if matched else "match no linear layer"
        raise ValueError(f"{targets=}, {exclude=} {reason}; the model has: {listed or 'none'}")
    if targets is not None and not isinstance(targets, str):
        of_linear = (name for module in linear.values() for name in names[module])
        _check_each_matches(targets, [*of_linear, *matched_experts(model)])
    return own


def names_of_each(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module: one that several modules hold has several."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _check_each_matches(targets: Iterable[str], names: list[str]) -> None:
    """Refuse a list of targets with an entry that matches no layer: it may be misspelt."""
    for target in targets:
        if not any(_names(name, [target]) or names_match(name, [target]) for name in names):
            listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(f"{target!r} in {targets=} matches no linear layer; the model has: {listed}")


def matched_experts(model: nn.Module, targets: Targets = None, exclude: Targets = ()) -> list[str]:
    """Names of the weights of experts that ``targets`` picks and ``exclude`` does not, as :func:`matched_modules`."""
    by_default = targets is None or targets == "all-linear"
    names = (
        f"{name}.{weight}" if name else weight
        for name, module in model.named_modules()
        for weight in expert_weights(module)
    )
    return [name for name in names if (by_default or _names(name, targets)) and not _names(name, exclude)]


def _names(weight: str, patterns: Targets) -> bool:
    """Whether a pattern matches a weight of experts, or the module that has it."""
    return names_match(weight, patterns) or names_match(weight.rpartition(".")[0], patterns)


def expert_weights(module: nn.Module) -> dict[str, bool]:
    """The weights ``(E, m, n)`` of a module of experts by name, and whether they are stored as ``(E, n, m)``.

    Modules of Hugging Face transformers are known. Others say it themselves: ``grass_experts = {"up": False}``.
    """
    if (own := getattr(module, "grass_experts", None)) is not None:
        return _checked(module, own)
    if not has_gate_of_experts(module) or not hasattr(module, "is_transposed"):
        return {}
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    rows = module._modules.get(EXPERT_ROWS)
    held = {} if rows is None else rows._modules
    return {
        name: bool(module.is_transposed) for name in names if name in held or _is_batch(module._parameters.get(name))
    }


def _checked(module: nn.Module, named: object) -> dict[str, bool]:
    """The weights that a module names, if they are there."""
    if not isinstance(named, dict) or not all(isinstance(transposed, bool) for transposed in named.values()):
        raise TypeError(
            f"Invalid grass_experts={named!r} of {type(module).__name__}: must be a dict of names and bools"
        )
    rows = module._modules.get(EXPERT_ROWS)
    held = {} if rows is None else rows._modules
    for name in named:
        if name not in held and not _is_batch(module._parameters.get(name)):
            raise ValueError(
                f"Invalid grass_experts={named!r} of {type(module).__name__}: {name!r} is no parameter (E, m, n)"
            )
    return dict(named)


def _is_batch(weight: Tensor | None) -> bool:
    return weight is not None and weight.ndim == 3 and weight.is_floating_point()


def is_linear(module: nn.Module) -> bool:
    """Whether the module multiplies by a 2-D weight: ``nn.Linear`` or Hugging Face's ``Conv1D``."""
    is_conv1d = any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)
    return isinstance(module, nn.Linear) or is_conv1d


def names_match(name: str, patterns: Targets) -> bool:
    """Whether patterns, given as ``targets`` of :func:`matched_modules`, pick a name; ``None`` picks none."""
    if patterns is None or patterns == "all-linear":
        return patterns is not None
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == p or name.endswith(f".{p}") or re.fullmatch(p, name) is not None for p in patterns)


def _head_names(model: nn.Module) -> Iterator[str]:
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    for name, module in model.named_modules(remove_duplicate=False):
        if module is head or name.rpartition(".")[2] in HEAD_NAMES:
            yield name


def _not_its_own(module: nn.Module, shared: Collection[int]) -> str | None:
    """Why a linear layer's weight is not to be selected of, if so.

    It is looked up past the module's attributes: reading a parametrized weight computes it, which may change buffers,
    as of spectral norm.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        return "no parameter but computed from others"
    if id(weight) in shared:
        return "shared with another module"
    return "empty" if weight.numel() == 0 else None


def _shared_weights(model: nn.Module) -> set[int]:
    """``id`` of every parameter that more than one module holds."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {key for key, count in holders.items() if count > 1}
