"""Which weights Grass projects: target patterns in, parameter groups out."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from inspect import signature
from typing import Any

from torch import nn

from grass.coverage import report
from grass.layers import CompactLayer
from grass.optimizer import GrassAdamW

logger = logging.getLogger("grass")

HEAD_NAMES = frozenset({"lm_head", "embed_out", "output", "head", "score", "classifier", "qa_outputs"})
"""Last component of the module names taken for output heads, beside what ``get_output_embeddings()`` returns."""

Targets = str | Iterable[str] | None


def param_groups(
    model: nn.Module,
    rank: int | float,
    *,
    targets: Targets = None,
    exclude: Targets = (),
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Two parameter groups for :class:`grass.GrassAdamW`: the targeted weights projected, all the rest plain AdamW.

    Biases, norms, embeddings and output heads go to the second group. One line tells the share of the parameters that
    is projected and names the weights that are not: on the logger ``grass``, or on stderr where logging is not
    configured. The names matched stay readable as ``optimizer.param_groups[0]["param_names"]``.

    Args:
        model: any module; linear layers are ``nn.Linear`` and Hugging Face's ``Conv1D``.
        rank: rows to train, a number or a fraction of the selected dimension.
        targets: as in :func:`matched_modules`.
        exclude: as ``targets``; what matches both is left out.
        overrides: any other group key, for the projected group (``update_interval=50``, ``dim=1``, ...).

    Raises:
        TypeError: an override is no argument of :class:`grass.GrassAdamW`.
        ValueError: nothing matches, or :func:`grass.compact` has converted all that does.
    """
    unknown = overrides.keys() - signature(GrassAdamW).parameters.keys()
    if unknown:
        raise TypeError(f"GrassAdamW has no argument {', '.join(sorted(unknown))}")
    matched = matched_modules(model, targets, exclude)
    projected = {f"{name}.weight" for name in matched}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rest = {"params": [item for item in named if item[0] not in projected], "rank": None}
    group = {"params": [item for item in named if item[0] in projected], "rank": rank, **overrides}
    if not group["params"]:
        if any(isinstance(model.get_submodule(name), CompactLayer) for name in matched):
            raise ValueError(
                "grass.compact() has converted this model: pass it as it is, GrassAdamW(model), or call "
                "grass.expand(model) first for dense mode"
            )
        raise ValueError("Every weight that matches is frozen (requires_grad=False)")
    report_coverage(model, "projects", [name.removesuffix("weight").removesuffix(".") for name, _ in group["params"]])
    return [group, rest] if rest["params"] else [group]


def report_coverage(model: nn.Module, verb: str, covered: Collection[str]) -> None:
    """Say what Grass covers of a model (:func:`grass.coverage.report`), ``covered`` being names of linear layers."""
    heads = set(_head_names(model))
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    report(model, verb, covered, {name: "output head" if name in heads else "linear" for name in linear})


def matched_modules(model: nn.Module, targets: Targets = None, exclude: Targets = ()) -> list[str]:
    """Names of the linear layers that ``targets`` picks and ``exclude`` does not.

    ``None`` and ``"all-linear"`` pick every linear layer but the output heads and those whose weight is shared with
    another module (tied embeddings). Any other string is a regular expression for the whole module name. A list picks
    modules whose name is, or ends in, one of its entries (``["q_proj", "mlp.down_proj"]``) or matches it as a regular
    expression. Named heads are picked when ``targets`` names them; shared weights never are.

    Raises:
        ValueError: nothing matches.
    """
    by_default = targets is None or targets == "all-linear"
    heads = set(_head_names(model)) if by_default else set()
    shared = _shared_weights(model)
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    matched = [
        name
        for name in linear
        if name not in heads and (by_default or _matches(name, targets)) and not _matches(name, exclude)
    ]
    empty = [name for name in matched if linear[name].weight.numel() == 0]
    own = [name for name in matched if id(linear[name].weight) not in shared and name not in empty]
    for name in matched:
        if name not in own:
            reason = "empty" if name in empty else "shared with another module"
            logger.warning("Grass passes over %s: its weight is %s", name, reason)
    if not own:
        listed = ", ".join([*linear][:8]) + (", ..." if len(linear) > 8 else "")
        reason = "match only layers with shared or empty weights" if matched else "match no linear layer"
        raise ValueError(f"{targets=}, {exclude=} {reason}; the model has: {listed or 'none'}")
    return own


def is_linear(module: nn.Module) -> bool:
    """Whether the module multiplies by a 2-D weight: ``nn.Linear`` or Hugging Face's ``Conv1D``."""
    is_conv1d = any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)
    return isinstance(module, nn.Linear) or is_conv1d


def _matches(name: str, patterns: Targets) -> bool:
    if patterns is None or patterns == "all-linear":
        return patterns is not None
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == p or name.endswith(f".{p}") or re.fullmatch(p, name) is not None for p in patterns)


def _head_names(model: nn.Module) -> Iterator[str]:
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    for name, module in model.named_modules():
        if module is head or name.rpartition(".")[2] in HEAD_NAMES:
            yield name


def _shared_weights(model: nn.Module) -> set[int]:
    """``id`` of every parameter that more than one module holds."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {key for key, count in holders.items() if count > 1}
