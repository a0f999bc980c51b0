"""The three ways in which :class:`grass.GrassAdamW` steps a parameter: plain, projected, active."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from grass.active import adopt, finish_step
from grass.functional import (
    ScratchPool,
    compiled_project_and_step,
    compiled_step_active,
    decay_all_,
    project_and_step_,
    step_active_,
)
from grass.hyperparameters import as_matrix, resolve_dim, resolve_rank
from grass.layers import CompactLayer
from grass.moments import State, moment_dtype
from grass.refresh import GroupCoefficients, carry_moments, current_projector, refresh, refresh_due


@dataclass
class GroupStep:
    """One step of one parameter group: what its parameters share."""

    group: dict[str, Any]
    scratch: ScratchPool
    coefficients: GroupCoefficients = field(init=False)

    def __post_init__(self) -> None:
        self.coefficients = GroupCoefficients(self.group)

    def plain(self, params: list[Tensor], states: list[State]) -> None:
        """AdamW by torch's own fused (CPU, CUDA) or foreach implementation."""
        if not params:
            return
        fused = all(p.device.type in ("cpu", "cuda") for p in params)
        for p, state in zip(params, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=p.device if fused else "cpu")
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=fused or None,
            amsgrad=False,
            beta1=self.group["betas"][0],
            beta2=self.group["betas"][1],
            lr=self.group["lr"],
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=self.group["maximize"],
        )

    def projected(self, p: Tensor, grad: Tensor, state: State, index: int) -> None:
        """Choose new rows of a weight if that is due, then update the chosen rows from its full gradient."""
        group, weight, grad = self.group, as_matrix(p.detach()), as_matrix(grad)
        if refresh_due(state, group):
            dim = resolve_dim(group["dim"], weight)
            rank = resolve_rank(group["rank"], weight.shape[dim])
            norms = torch.linalg.vector_norm(grad, dim=1 - dim, dtype=moment_dtype(weight))
            if not refresh(state, carry_moments(state, weight, group), norms, dim, rank, group, index):
                return
        state["step"] += 1
        coefficients = self.coefficients.at(state)
        if group["decay"] == "all":
            coefficients = decay_all_(weight, coefficients)
        arguments = weight, current_projector(state), grad, state["exp_avg"], state["exp_avg_sq"], coefficients
        if group["fused"]:
            compiled_project_and_step()(*arguments, **self._adam)
        else:
            project_and_step_(*arguments, self.scratch.like(state["exp_avg"]), **self._adam)
        if weight.data_ptr() != p.data_ptr():  # a copy: channels_last
            p.copy_(weight.view(p.shape))

    def active(self, p: Tensor, grad: Tensor, layer: CompactLayer, state: State, index: int) -> None:
        """Update the active rows of a converted layer, write them back, choose new ones if that is due."""
        group = self.group
        carry = carry_moments(state, layer.matrix(), group)
        if not state:
            adopt(state, layer, carry)
            if not group["lr"] and not grad.any():
                return  # a fresh optimizer building its state, as in `refresh`
        state["step"] += 1
        coefficients = self.coefficients.at(state)
        if group["decay"] == "all":
            layer.matrix().mul_(coefficients.shrink)
        arguments = p.detach(), layer.dim, grad, state["exp_avg"], state["exp_avg_sq"], coefficients
        if group["fused"]:
            compiled_step_active()(*arguments, **self._adam)
        else:
            step_active_(*arguments, self.scratch.like(state["exp_avg"]), **self._adam)
        finish_step(layer, state, carry, group, index)

    @property
    def _adam(self) -> dict[str, Any]:
        return {key: self.group[key] for key in ("betas", "eps", "maximize")}
