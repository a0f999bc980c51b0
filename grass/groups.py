"""Parameter groups for :class:`grass.GrassAdamW`."""

from __future__ import annotations

import weakref
from inspect import signature
from typing import Any

from torch import nn

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.unconvertible import adapters
from grass.optimizer import GrassAdamW, NamedByModel
from grass.targets import Targets, matched_experts, matched_modules, names_match, report_coverage

__all__ = ["matched_modules", "param_groups"]


def param_groups(
    model: nn.Module,
    rank: int | float,
    *,
    targets: Targets = None,
    exclude: Targets = (),
    no_decay: Targets = (),
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`grass.GrassAdamW`: projected target weights, and plain AdamW for the rest.

    Weights of experts, ``(E, m, n)``, are projected too, expert by expert. Biases, norms, embeddings, output heads and
    the adapters of PEFT go to the second group. What of the groups shall not decay makes groups of its own, which come
    last. One line reports the share of the parameters that is projected and the weights that are
    not: on the logger ``grass``, or on stderr if logging is not configured. The
    matched names are in ``optimizer.param_groups[0]["param_names"]``. Groups without names may be added later.

    Args:
        model: any module; linear layers are ``nn.Linear`` and Hugging Face's ``Conv1D``.
        rank: rows to train, a number or a fraction of the selected dimension.
        targets: as in :func:`matched_modules`.
        exclude: layers to leave out, given like ``targets``.
        no_decay: parameters with ``weight_decay=0``, by their names, given like ``targets``:
            ``["bias", r".*norm.*"]``.
        overrides: other keys of the projected group (``update_interval=50``, ``dim=1``, ...).

    Raises:
        TypeError: an override is not an argument of :class:`grass.GrassAdamW`.
        ValueError: nothing matches, ``no_decay`` matches nothing, all that matches is frozen or part of an adapter, or
            :func:`grass.compact` has converted all matching layers.
    """
    unknown = overrides.keys() - signature(GrassAdamW).parameters.keys()
    if unknown:
        raise TypeError(f"GrassAdamW has no argument {', '.join(sorted(unknown))}")
    experts = set(matched_experts(model, targets, exclude))
    matched = matched_modules(model, targets, exclude, may_be_none=bool(experts))
    small = adapters(model)
    projected = {f"{name}.weight" for name in matched if name not in small} | experts
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rest = {"params": [item for item in named if item[0] not in projected], "rank": None}
    group = {"params": [item for item in named if item[0] in projected], "rank": rank, **overrides}
    if experts:
        group["experts"] = True
    if not group["params"]:
        if any(isinstance(model.get_submodule(name), CompactLayer) for name in matched):
            raise ValueError(
                "grass.compact() has converted this model: pass it as it is, GrassAdamW(model), or call "
                "grass.expand(model) first for dense mode"
            )
        raise ValueError(
            "Every weight that matches is frozen (requires_grad=False)"
            + (" or part of a PEFT adapter, which trains at full rank" if small else "")
        )
    names = [name if name in experts else name.removesuffix("weight").removesuffix(".") for name, _ in group["params"]]
    report_coverage(model, "projects", names)
    groups = _split_by_decay([group, rest] if rest["params"] else [group], no_decay)
    groups[0]["params"].model = weakref.ref(model)
    return groups


def _split_by_decay(groups: list[dict[str, Any]], no_decay: Targets) -> list[dict[str, Any]]:
    """Move parameters that shall not decay into groups of their own."""
    without = []
    for group in groups:
        named = group["params"]
        still = [item for item in named if names_match(item[0], no_decay)]
        group["params"] = [item for item in named if not names_match(item[0], no_decay)]
        without.append({**group, "params": still, "weight_decay": 0.0})
    if no_decay and not any(group["params"] for group in without):
        raise ValueError(
            f"{no_decay=} matches no parameter; some are: {', '.join(n for n, _ in groups[0]['params'][:8])}"
        )
    return [{**group, "params": NamedByModel(group["params"])} for group in [*groups, *without] if group["params"]]
