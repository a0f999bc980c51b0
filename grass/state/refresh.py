"""The life of one selection: when a new one is due, and how it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from grass.options import Options
from grass.parallel.shards import summed
from grass.private_names import FakeTensor
from grass.selection.draws import cycle_generator, selection_generator
from grass.selection.projector import Projector
from grass.selection.rules import BALANCED, Selection, select_rows
from grass.state.schema import State, shared_steps

Carry = Callable[[Projector | None, Projector, Tensor | None], None]
"""``carry(old, new, resting)`` moves moments from the old selection to the new one.

``old`` is ``None`` at first. ``resting`` is bool ``(r,)``: the rows of experts without tokens, whose state stays as it
is; ``None`` means none.
"""


class Outcome(Enum):
    """What a refresh has done."""

    CHOSEN = "gradient norms decided the selection"
    STAYED = "norms were all zero: the earlier selection stays, and the refresh stays due"
    PROVISIONAL = "norms were all zero and there was no selection yet: one was made, and the refresh stays due"


def refresh_due(state: State, group: Options | Mapping[str, Any]) -> bool:
    """Whether the next step selects rows: the first step, every ``update_interval``-th, or after zero norms."""
    return not state or state["refreshes"] == 0 or shared_steps(state) >= Options.of(group).update_interval


def is_due(state: State, options: Options) -> bool:
    """Whether dense mode selects rows in the coming step."""
    return not state or ("indices" in state and refresh_due(state, options))


def may_be_due(state: State, options: Options) -> bool:
    """Whether the coming step may select rows, for which ranks communicate; compact mode does so after its update."""
    return is_due(state, options) or ("indices" in state and shared_steps(state) + 1 >= options.update_interval)


def refresh(
    state: State,
    carry: Carry,
    norms: Tensor,
    dim: int,
    rank: int,
    group: Options | Mapping[str, Any],
    index: int,
    experts: int = 1,
    *,
    informative: bool | None = None,
) -> Outcome:
    """Select rows of a weight ``(m, n)`` by the ``norms`` of its gradient along ``dim`` and move the moments over.

    Norms that are all zero (or not finite) cannot decide: the earlier selection stays, a first one is provisional, and
    the refresh stays due.

    Args:
        state: of this weight; gets ``indices``, ``row_scale`` and counters.
        carry: moves the moments to the new selection.
        norms: ``(m,)`` for ``dim=0``, ``(n,)`` for ``dim=1``.
        dim: 0 selects rows, 1 columns.
        rank: how many.
        group: the parameter group, or its options.
        index: the parameter's place among all groups, which with ``seed`` determines the draw.
        experts: how many matrices the rows belong to. One whose norms are all zero stays
            with its earlier selection and moments.
        informative: whether norms decide, where these ``norms`` are only a part of them; ``None``: whether these do.
    """
    norms, device = norms.cpu(), norms.device
    informative = is_informative(norms) if informative is None else informative
    selection = choose(state, norms, rank, group, index, experts, informative=informative)
    if selection is None:
        return Outcome.STAYED
    if not state:
        state.update(step=0, refresh_step=0, refreshes=0)
    old = current_projector(state) if "indices" in state else None
    new = Projector.from_selection(selection, dim, device)
    resting = None
    if old is not None and _may_rest(norms, experts):
        resting = _resting(norms, experts).expand(-1, rank // experts).flatten().to(device)
    carry(old, new, resting)
    state.update(indices=new.indices, dim=dim, refresh_step=state["step"])
    state.pop("row_scale", None)
    if new.scale is not None:
        state["row_scale"] = new.scale
    state["refreshes"] += informative
    return Outcome.CHOSEN if informative else Outcome.PROVISIONAL


def choose(
    state: State,
    norms: Tensor,
    rank: int,
    group: Options | Mapping[str, Any],
    index: int,
    experts: int = 1,
    *,
    informative: bool | None = None,
) -> Selection | None:
    """The rows that :func:`refresh` selects; ``None`` if the earlier selection stays."""
    if state and not (is_informative(norms) if informative is None else informative):
        return None
    options = Options.of(group)
    number, turn = state.get("refreshes", 0), 0
    if options.selection == BALANCED:
        cycle, turn = divmod(number, len(norms) // rank)
        generator = cycle_generator(options.seed, index, cycle)
    else:
        generator = selection_generator(options.seed, index, number)
    chosen = select_rows(
        norms, rank, options.selection, generator, replacement=options.replacement, experts=experts, turn=turn
    )
    if "indices" in state and _may_rest(norms, experts):
        earlier = state["indices"].cpu().view(experts, -1)
        chosen = Selection(torch.where(_resting(norms, experts), earlier, chosen.indices.view(experts, -1)).flatten())
    return chosen


def have_tokens(grad: Tensor, like: Tensor) -> Tensor:
    """bool ``(E,)``: the experts whose part of a gradient ``(E, ...)`` is not zero; all of one without contents.

    Args:
        grad: this rank's part of the gradient.
        like: the gradient as it is sharded over the ranks, which all get the same answer.
    """
    if isinstance(grad, FakeTensor):
        return torch.ones(len(grad), dtype=torch.bool, device=grad.device)
    seen = (grad != 0).flatten(1).any(dim=1)
    return seen if type(like) is Tensor else summed(seen.to(torch.int32), like) > 0


def of_each(rows: Tensor, dim: int, experts: int) -> Tensor:
    """The part of each expert in rows (``dim=1``: columns) of all experts beside each other: ``(E, ...)``, a view."""
    sizes = [*rows.shape]
    sizes[dim : dim + 1] = experts, sizes[dim] // experts
    return rows.view(sizes).movedim(dim, 0)


def norms_of_experts(seen: Tensor, size: int) -> Tensor:
    """Norms for a rule that reads none: one for each of ``size`` rows, zero for those of experts without tokens."""
    return seen.to(torch.float32).repeat_interleave(size // len(seen), output_size=size)


def _may_rest(norms: Tensor, experts: int) -> bool:
    """Whether rows may stay as they are: those of experts, also of the only one that a rank has."""
    return experts > 1 or not is_informative(norms)


def _resting(norms: Tensor, experts: int) -> Tensor:
    """bool ``(experts, 1)``: the experts whose norms are all zero, because no token was sent to them."""
    return ~(norms.isfinite() & (norms > 0)).view(experts, -1).any(dim=1, keepdim=True)


def is_informative(norms: Tensor) -> bool:
    """Whether the norm of any row is finite and above zero."""
    return bool((norms.isfinite() & (norms > 0)).any())


def current_projector(state: State) -> Projector:
    """The projector onto the selected rows."""
    return Projector(state["indices"], state.get("row_scale"), state["dim"])
