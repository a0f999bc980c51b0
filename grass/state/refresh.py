"""The life of one selection: when it is due, and how it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grass.selection.draws import selection_generator
from grass.selection.projector import Projector
from grass.selection.rules import Selection, select_rows
from grass.state.bank import Swap
from grass.state.bank_exchange import BankExchange
from grass.state.moments import HOST_KEYS, State, keep, reset, shared_steps
from grass.state.precision import full_moments, rounding_key

Carry = Callable[[Projector | None, Projector], None]
"""``carry(old, new)`` moves the moments from the old selection, ``None`` at first, to the new one."""


def carry_moments(state: State, weight: Tensor, group: dict[str, Any], index: int, exchange: BankExchange) -> Carry:
    """The group's state policy, bound to one weight ``(m, n)``, its state and the way of exchange with the bank."""

    def carry(old: Projector | None, new: Projector) -> None:
        moments = full_moments(state, group["moment_dtype"], rounding_key(group, index, -1 - state["step"]))
        if group["state_policy"] == "bank":
            share = exchange.share(weight.shape[new.dim])
            exchange.swap(Swap(state, old, new, weight, getattr(torch, group["bank_dtype"]), share), moments)
            return
        for key in HOST_KEYS:
            state.pop(key, None)
        with moments:
            if group["state_policy"] == "keep":
                keep(state, old, new, weight)
            else:
                reset(state, new, weight)

    return carry


def refresh_due(state: State, group: dict[str, Any]) -> bool:
    """Whether the next step chooses rows: the first, every ``update_interval``-th, or one put off by zero norms."""
    return not state or state["refreshes"] == 0 or shared_steps(state) >= group["update_interval"]


def refresh(state: State, carry: Carry, norms: Tensor, dim: int, rank: int, group: dict[str, Any], index: int) -> bool:
    """Choose rows of a weight ``(m, n)`` from the ``norms`` of its gradient along ``dim`` and carry the moments over.

    Norms that are all zero (or not finite) tell nothing: rows chosen earlier stay, a first choice is provisional, and
    the refresh stays due.

    Args:
        state: of this weight; gets ``indices``, ``row_scale`` and counters.
        carry: gives the state the moments of the new selection.
        norms: ``(m,)`` for ``dim=0``, ``(n,)`` for ``dim=1``.
        dim: 0 selects rows, 1 columns.
        rank: how many.
        group: the parameter group: ``seed``, ``selection``, ``replacement``.
        index: the parameter's place among all groups, which with ``seed`` determines the draw.

    Returns:
        Whether the step goes on. It does not where a learning rate of zero meets a zero gradient in the first step, as
        when ``torch.distributed.checkpoint`` has a fresh optimizer build its state: state is made, nothing is counted.
    """
    norms, device = norms.cpu(), norms.device
    selection, informative = choose(state, norms, rank, group, index), is_informative(norms)
    if selection is None:
        return True
    if not state:
        state.update(step=0, refresh_step=0, refreshes=0)
    old = current_projector(state) if "indices" in state else None
    new = Projector.from_selection(selection, dim, device)
    carry(old, new)
    state.update(indices=new.indices, dim=dim, refresh_step=state["step"])
    state.pop("row_scale", None)
    if new.scale is not None:
        state["row_scale"] = new.scale
    state["refreshes"] += informative
    return informative or bool(group["lr"] != 0)


def choose(state: State, norms: Tensor, rank: int, group: dict[str, Any], index: int) -> Selection | None:
    """The rows that :func:`refresh` goes over to; ``None`` where those chosen earlier stay."""
    if state and not is_informative(norms):
        return None
    generator = selection_generator(group["seed"], index, state.get("refreshes", 0))
    return select_rows(norms, rank, group["selection"], generator, replacement=group["replacement"])


def is_informative(norms: Tensor) -> bool:
    """Whether any row is known to be larger than zero."""
    return bool((norms.isfinite() & (norms > 0)).any())


def current_projector(state: State) -> Projector:
    """The projector of the rows being trained."""
    return Projector(state["indices"], state.get("row_scale"), state["dim"])
