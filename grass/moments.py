r"""What becomes of Adam's moments when the selection changes: ``reset``, ``keep`` or ``bank``.

======== ================================================================ ==================================
policy   at a refresh                                                     memory beside the ``2rn`` values
======== ================================================================ ==================================
reset    all moments and step counts start again (the paper)              none
keep     a row chosen again keeps its moments and its own step count      ``r`` step counts
bank     every row's moments and step count live in host memory, and      ``r`` step counts; on the host
         the chosen rows are swapped                                      ``2mn`` values, ``m`` step counts
======== ================================================================ ==================================

Moments are those of the scaled gradient ``rho G``. A row whose scale changes between two selections (drawn with
replacement) takes its moments along in the new scale: ``M rho'/rho`` and ``V (rho'/rho)^2``. Copies of one row within a
selection have seen the same gradients and hold the same moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grass.projector import Projector

State = dict[str, Any]
Policy = Callable[[State, Projector | None, Projector, Tensor, torch.dtype], None]
"""``policy(state, old, new, weight, bank_dtype)`` gives ``state`` the moments of the new selection."""

HOST_KEYS = frozenset({"bank_exp_avg", "bank_exp_avg_sq", "bank_steps"})
"""State that stays in host memory wherever the weight is."""


def moment_dtype(weight: Tensor) -> torch.dtype:
    """Moments are kept in float32 under half-precision weights, else in the weight's own precision."""
    return torch.promote_types(weight.dtype, torch.float32)


def shared_steps(state: State) -> int:
    """Adam steps since the last refresh: the step count of every row under ``reset``."""
    steps: int = state["step"] - state["refresh_step"]
    return steps


def reset(state: State, old: Projector | None, new: Projector, weight: Tensor, bank_dtype: torch.dtype) -> None:
    """Start again: zero moments, shared step count."""
    for key in ("row_steps", *HOST_KEYS):
        state.pop(key, None)
    _set_moments(state, _zeros(new, weight), _zeros(new, weight))


def keep(state: State, old: Projector | None, new: Projector, weight: Tensor, bank_dtype: torch.dtype) -> None:
    """Rows chosen again keep moments and step count, the others start at zero."""
    for key in HOST_KEYS:
        state.pop(key, None)
    if old is None:
        steps = torch.zeros(new.indices.shape, device=weight.device)
        _set_moments(state, _zeros(new, weight), _zeros(new, weight), steps)
        return
    kept, source = source_rows(old, new, weight.shape[new.dim])
    ratio = torch.ones(kept.shape, dtype=moment_dtype(weight), device=kept.device)
    if old.scale is not None or new.scale is not None:
        ratio = ratio * _scale(new, weight) / _scale(old, weight)[source]
    had, ratio, kept_rows = new.along(kept), new.along(ratio), Projector(source, None, new.dim)
    _set_moments(
        state,
        torch.where(had, kept_rows.gather(state["exp_avg"]) * ratio, 0.0),
        torch.where(had, kept_rows.gather(state["exp_avg_sq"]) * ratio.square(), 0.0),
        torch.where(kept, _row_steps(state, old)[source], 0.0),
    )


def bank(state: State, old: Projector | None, new: Projector, weight: Tensor, bank_dtype: torch.dtype) -> None:
    """Put the old rows' moments back into the bank and take the new rows' out."""
    if "bank_steps" not in state:
        pin = weight.device.type == "cuda"
        for key in ("bank_exp_avg", "bank_exp_avg_sq"):
            state[key] = torch.zeros_like(weight, dtype=bank_dtype, device="cpu", pin_memory=pin)
        state["bank_steps"] = torch.zeros(weight.shape[new.dim], pin_memory=pin)
    if old is not None:
        _deposit(state, old, weight)
    _withdraw(state, new, weight)


def source_rows(old: Projector, new: Projector, size: int) -> tuple[Tensor, Tensor]:
    """For each new row of ``size``, whether the old selection had it, and where (0 if it had not)."""
    slot = new.indices.new_full((size,), -1)
    slot[old.indices] = torch.arange(old.indices.numel(), device=slot.device)
    source = slot[new.indices]
    return source >= 0, source.clamp(min=0)


POLICIES: dict[str, Policy] = {"reset": reset, "keep": keep, "bank": bank}


def _deposit(state: State, projector: Projector, weight: Tensor) -> None:
    scale, on_host = projector.along(_scale(projector, weight)), Projector(projector.indices.cpu(), None, projector.dim)
    for key, divisor in (("exp_avg", scale), ("exp_avg_sq", scale.square())):
        rows = state[key] if projector.scale is None else state[key] / divisor
        on_host.scatter_(state[f"bank_{key}"], _to_host(rows))
    state["bank_steps"][on_host.indices] = _row_steps(state, projector).cpu()


def _withdraw(state: State, projector: Projector, weight: Tensor) -> None:
    scale, on_host = projector.along(_scale(projector, weight)), Projector(projector.indices.cpu(), None, projector.dim)
    moments = {}
    for key, factor in (("exp_avg", scale), ("exp_avg_sq", scale.square())):
        rows = on_host.gather(state[f"bank_{key}"]).to(moment_dtype(weight))
        if weight.device.type == "cuda":
            rows = rows.pin_memory()  # else the copy stages it anyway, and slower
        rows = rows.to(weight.device, non_blocking=True)
        moments[key] = rows if projector.scale is None else rows * factor
    steps = state["bank_steps"][on_host.indices].to(weight.device)
    _set_moments(state, moments["exp_avg"], moments["exp_avg_sq"], steps)


def _to_host(rows: Tensor) -> Tensor:
    """A copy in host memory, complete on return; pinned under CUDA, where the link is then used in full."""
    if rows.device.type != "cuda":
        return rows.cpu()
    host = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()
    return host


def _set_moments(state: State, exp_avg: Tensor, exp_avg_sq: Tensor, row_steps: Tensor | None = None) -> None:
    state["exp_avg"], state["exp_avg_sq"] = exp_avg, exp_avg_sq
    if row_steps is not None:
        state["row_steps"] = row_steps


def _row_steps(state: State, projector: Projector) -> Tensor:
    """Every row's step count, also where the state so far had one for all."""
    if "row_steps" in state:
        steps: Tensor = state["row_steps"]
        return steps
    return torch.full(projector.indices.shape, float(shared_steps(state)), device=projector.indices.device)


def _scale(projector: Projector, weight: Tensor) -> Tensor:
    """``rho`` as a vector, ones where the projector has none."""
    if projector.scale is not None:
        return projector.scale.to(moment_dtype(weight))
    return torch.ones(projector.indices.shape, dtype=moment_dtype(weight), device=weight.device)


def _zeros(projector: Projector, weight: Tensor) -> Tensor:
    rows = weight.narrow(projector.dim, 0, projector.indices.numel())  # for its shape and strides
    return torch.zeros_like(rows, dtype=moment_dtype(weight))
