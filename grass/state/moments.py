"""Adam's moments of selected rows, from one selection to the next.

Moments are those of the scaled gradient ``rho G``. If a row's scale changes between two selections (rows drawn with
replacement), its moments change with it: ``M rho'/rho`` and ``V (rho'/rho)^2``. Copies of one row within a selection
have seen the same gradients and hold the same moments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grass.selection.projector import Projector
from grass.state.schema import MOMENTS, State, shared_steps


class Moments(NamedTuple):
    """The moments of some rows, those of the unscaled gradient, and the rows' Adam steps, float32 ``(r,)``."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor


def moment_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of moments: float32 for half-precision weights, otherwise the weight's own."""
    return torch.promote_types(weight.dtype, torch.float32)


def reset(state: State, new: Projector, weight: Tensor) -> None:
    """Set the moments of all selected rows to zero; the rows share one step count."""
    state.pop("row_steps", None)
    rows = weight.narrow(new.dim, 0, new.indices.numel())  # for its shape and strides
    for key in MOMENTS:
        state[key] = torch.zeros_like(rows, dtype=moment_dtype(weight))


def keep(state: State, old: Projector | None, new: Projector, weight: Tensor, *, among: Tensor | None = None) -> None:
    """Rows selected again keep moments and step count; the others start at zero.

    ``among``, bool ``(r,)``, limits the rows that keep them.
    """
    if old is not None:
        kept, source = source_rows(old, new, weight.shape[new.dim])
        kept = kept if among is None else kept & among
        staying = held(state, old, source[kept])
    reset(state, new, weight)
    state["row_steps"] = torch.zeros(new.indices.shape, dtype=torch.float32, device=weight.device)
    if old is not None:
        put(state, new, kept.nonzero().flatten(), staying)


def source_rows(old: Projector, new: Projector, size: int) -> tuple[Tensor, Tensor]:
    """For each row of the new selection: whether the old one had it, and at which place (0 if not)."""
    slot = new.indices.new_full((size,), -1)
    slot[old.indices] = torch.arange(old.indices.numel(), device=slot.device)
    source = slot[new.indices]
    return source >= 0, source.clamp(min=0)


def held(state: State, projector: Projector, places: Tensor) -> Moments:
    """Read the moments of the selected rows at some ``places`` of the selection."""
    rows = Projector(places, None, projector.dim)
    exp_avg, exp_avg_sq = rows.gather(state["exp_avg"]), rows.gather(state["exp_avg_sq"])
    if projector.scale is not None:
        scale = projector.along(projector.scale[places].to(exp_avg.dtype))
        exp_avg, exp_avg_sq = exp_avg / scale, exp_avg_sq / scale.square()
    return Moments(exp_avg, exp_avg_sq, _row_steps(state, projector)[places])


def put(state: State, projector: Projector, places: Tensor, moments: Moments) -> None:
    """Write moments to ``places`` of the selection; the inverse of :func:`held`."""
    rows = Projector(places, None, projector.dim)
    exp_avg, exp_avg_sq = (m.to(state["exp_avg"].dtype) for m in (moments.exp_avg, moments.exp_avg_sq))
    if projector.scale is not None:
        scale = projector.along(projector.scale[places].to(exp_avg.dtype))
        exp_avg, exp_avg_sq = exp_avg * scale, exp_avg_sq * scale.square()
    rows.scatter_(state["exp_avg"], exp_avg)
    rows.scatter_(state["exp_avg_sq"], exp_avg_sq)
    state["row_steps"][places] = moments.steps


def _row_steps(state: State, projector: Projector) -> Tensor:
    """Every row's Adam steps, also if the state has one number for all."""
    if "row_steps" in state:
        steps: Tensor = state["row_steps"]
        return steps
    shape, device = projector.indices.shape, projector.indices.device
    return torch.full(shape, float(shared_steps(state)), dtype=torch.float32, device=device)
