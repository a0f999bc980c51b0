r"""What becomes of Adam's moments when the selection changes: ``reset``, ``keep`` or ``bank``.

======== ================================================================ ==================================
policy   at a refresh                                                     memory beside the ``2rn`` values
======== ================================================================ ==================================
reset    all moments and step counts start again (the paper)              none
keep     a row chosen again keeps its moments and its own step count      ``r`` step counts
bank     likewise, and the other rows' moments and step counts wait in    ``r`` step counts; on the host
         host memory until they are chosen again (:mod:`grass.state.bank`)      ``2mn`` values, ``m`` step counts
======== ================================================================ ==================================

Moments are those of the scaled gradient ``rho G``. A row whose scale changes between two selections (drawn with
replacement) takes its moments along in the new scale: ``M rho'/rho`` and ``V (rho'/rho)^2``. Copies of one row within a
selection have seen the same gradients and hold the same moments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grass.selection.projector import Projector

State = dict[str, Any]

POLICIES: tuple[str, ...] = ("reset", "keep", "bank")
HOST_KEYS = frozenset({"bank_exp_avg", "bank_exp_avg_sq", "bank_steps"})
"""State that stays in host memory wherever the weight is."""


class Moments(NamedTuple):
    """Both moments of some rows, of the plain gradient, and the rows' step counts, float32 ``(r,)``."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor


def moment_dtype(weight: Tensor) -> torch.dtype:
    """Moments are kept in float32 under half-precision weights, else in the weight's own precision."""
    return torch.promote_types(weight.dtype, torch.float32)


def shared_steps(state: State) -> int:
    """Adam steps since the last refresh: the step count of every row under ``reset``."""
    steps: int = state["step"] - state["refresh_step"]
    return steps


def reset(state: State, new: Projector, weight: Tensor) -> None:
    """Start again: zero moments, shared step count."""
    state.pop("row_steps", None)
    rows = weight.narrow(new.dim, 0, new.indices.numel())  # for its shape and strides
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.zeros_like(rows, dtype=moment_dtype(weight))


def keep(state: State, old: Projector | None, new: Projector, weight: Tensor) -> None:
    """Rows chosen again keep moments and step count, the others start at zero."""
    if old is not None:
        kept, source = source_rows(old, new, weight.shape[new.dim])
        staying = held(state, old, source[kept])
    reset(state, new, weight)
    state["row_steps"] = torch.zeros(new.indices.shape, dtype=torch.float32, device=weight.device)
    if old is not None:
        put(state, new, kept.nonzero().flatten(), staying)


def source_rows(old: Projector, new: Projector, size: int) -> tuple[Tensor, Tensor]:
    """For each new row of ``size``, whether the old selection had it, and where (0 if it had not)."""
    slot = new.indices.new_full((size,), -1)
    slot[old.indices] = torch.arange(old.indices.numel(), device=slot.device)
    source = slot[new.indices]
    return source >= 0, source.clamp(min=0)


def held(state: State, projector: Projector, places: Tensor) -> Moments:
    """What ``state`` holds for the selected rows at some ``places`` of the selection."""
    rows = Projector(places, None, projector.dim)
    exp_avg, exp_avg_sq = rows.gather(state["exp_avg"]), rows.gather(state["exp_avg_sq"])
    if projector.scale is not None:
        scale = projector.along(projector.scale[places].to(exp_avg.dtype))
        exp_avg, exp_avg_sq = exp_avg / scale, exp_avg_sq / scale.square()
    return Moments(exp_avg, exp_avg_sq, _row_steps(state, projector)[places])


def put(state: State, projector: Projector, places: Tensor, moments: Moments) -> None:
    """The inverse of :func:`held`."""
    rows = Projector(places, None, projector.dim)
    exp_avg, exp_avg_sq = (m.to(state["exp_avg"].dtype) for m in (moments.exp_avg, moments.exp_avg_sq))
    if projector.scale is not None:
        scale = projector.along(projector.scale[places].to(exp_avg.dtype))
        exp_avg, exp_avg_sq = exp_avg * scale, exp_avg_sq * scale.square()
    rows.scatter_(state["exp_avg"], exp_avg)
    rows.scatter_(state["exp_avg_sq"], exp_avg_sq)
    state["row_steps"][places] = moments.steps


def _row_steps(state: State, projector: Projector) -> Tensor:
    """Every row's step count, also where the state so far had one for all."""
    if "row_steps" in state:
        steps: Tensor = state["row_steps"]
        return steps
    shape, device = projector.indices.shape, projector.indices.device
    return torch.full(shape, float(shared_steps(state)), dtype=torch.float32, device=device)
