"""One line about a model: the share that Grass trains by rows, and the weights that train at full rank."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

logger = logging.getLogger("grass")

LOW = 0.5
"""The line is a warning if the share of the parameters is below this."""

NAMED = 4
"""Largest number of kinds of full-rank weights that the line names, the largest weights first."""

EXPERT_ROWS = "grass_rows"
"""The submodule of a module of experts that has its active rows (:mod:`grass.compact_mode.experts`)."""

_silenced = 0


@contextmanager
def silent() -> Iterator[None]:
    """Suppress the report, for callers that convert a model piece by piece."""
    global _silenced
    _silenced += 1
    try:
        yield
    finally:
        _silenced -= 1


def report(model: nn.Module, verb: str, covered: Collection[str], linear: Mapping[str, str]) -> None:
    """Report the share of the trainable parameters that Grass covers, and the weights that train at full rank.

    The line goes to the logger ``grass`` at level INFO, or WARNING if the share is below :data:`LOW`. If logging is not
    configured, the first process writes it to stderr.

    Args:
        model: the model.
        verb: what was done to the layers, "converted" for example.
        covered: names of the layers that Grass trains by selected rows.
        linear: the kind of each linear layer by its name, "linear" for example.
    """
    if _silenced:
        return
    selected, total, full = _sizes(model, covered, linear)
    share = selected / max(total, 1)
    largest = sorted(full.items(), key=lambda item: -item[1])
    listed = [f"{name} ({kind}, {size / total:.1%})" for (name, kind), size in largest[:NAMED]]
    more = [f"{len(full) - NAMED} more"] if len(full) > NAMED else []
    low = share < LOW
    line = f"Grass: {verb} {len(covered)} of {len(linear)} linear layers, {'only ' * low}{share:.1%} of parameters"
    line += f"; at full rank: {', '.join(listed + more)}" if full else ""
    _log(logging.WARNING if low else logging.INFO, line)


def report_rank(rank: int | float | None) -> None:
    """Say what ``rank=1`` is, because ``1.0`` may have been meant."""
    if isinstance(rank, int) and rank == 1:
        logger.warning("Grass: rank=1 selects one row (or column) of each weight; write rank=1.0 for all of them")


def report_scale(factors: Collection[float]) -> None:
    """Report what ``scale="auto"`` multiplies the learning rate of converted layers by, unless that is 1."""
    if not _silenced and any(factor != 1 for factor in factors):
        low, high = (f"{factor:.3g}" for factor in (min(factors), max(factors)))
        times = low if low == high else f"{low} to {high}"
        _log(logging.INFO, f"Grass: projected weights: lr x {times} (scale='auto'); other parameters: lr")


def report_decay(groups: Sequence[Mapping[str, Any]], rows: Collection[int]) -> None:
    """Say that no active row decays though other parameters do, as where names that end in "weight" make the group."""
    decaying = [group for group in groups if group.get("weight_decay")]
    held = any(id(p) in rows for group in groups for p in group["params"])
    if held and decaying and not any(id(p) in rows for group in decaying for p in group["params"]):
        logger.warning(
            "Grass: weight_decay=%s is for none of the active rows, which train in place of the weights: the names of "
            "these parameters end in 'active', not in 'weight'",
            decaying[0]["weight_decay"],
        )


def _sizes(
    model: nn.Module, covered: Collection[str], linear: Mapping[str, str]
) -> tuple[int, int, Counter[tuple[str, str]]]:
    """Count elements that Grass covers, elements that train, and elements of full-rank matrices by name and kind.

    Numbers in names become ``*``, so that the layers of a stack count as one.
    """
    selected = total = 0
    full: Counter[tuple[str, str]] = Counter()
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        module, _, attribute = name.rpartition(".")
        plain = module.replace(f"{EXPERT_ROWS}.", "")
        ours = name in covered or (plain in covered and attribute == "weight")
        rows = attribute == "active" and (module in covered or f".{EXPERT_ROWS}." in f".{module}")
        if is_lazy(p) or rows or not (p.requires_grad or ours):
            continue
        total += p.numel()
        if ours:
            selected += p.numel()
        elif p.ndim > 1:
            other = "embedding" if isinstance(modules[module], nn.Embedding) else f"{p.ndim}-D"
            shown = module if attribute == "weight" and module else name
            full[re.sub(r"\d+(?=\.|$)", "*", shown), linear.get(module, linear.get(name, other))] += p.numel()
    return selected, total, full


def _log(level: int, line: str) -> None:
    """Log a line, or write it to stderr if logging is not configured and would drop INFO."""
    if logger.hasHandlers():
        logger.log(level, line)
    elif level >= max(logger.level, logger.manager.disable + 1) and _first_process():
        print(line, file=sys.stderr)


def _first_process() -> bool:
    ready = dist.is_available() and dist.is_initialized()
    return (dist.get_rank() if ready else int(os.environ.get("RANK", "0"))) == 0
