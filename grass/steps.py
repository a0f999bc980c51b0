"""The three ways in which :class:`grass.GrassAdamW` steps a parameter: plain, projected, active."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from grass import cpu_kernel
from grass.active import adopt, arm, choose_rows
from grass.background import Background
from grass.functional import ScratchPool, decay_all_, project_and_step_, step_active_
from grass.hyperparameters import as_matrix, resolve_dim, resolve_rank
from grass.layers import CompactLayer
from grass.moments import State, moment_dtype, shared_steps
from grass.projector import Projector, is_column_major
from grass.refresh import GroupCoefficients, carry_moments, current_projector, refresh, refresh_due


@dataclass(slots=True)
class ActiveRows:
    """The active rows of one converted layer, in a step."""

    rows: Tensor
    grad: Tensor
    layer: CompactLayer
    state: State
    index: int

    def row_major(self) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """``dim``, rows, gradient and moments; transposed, ``dim`` too, where columns are contiguous in memory."""
        dim, rows, grad = self.layer.dim, self.rows, self.grad
        exp_avg, exp_avg_sq = self.state["exp_avg"], self.state["exp_avg_sq"]
        if is_column_major(rows):
            return 1 - dim, rows.t(), grad.t(), exp_avg.t(), exp_avg_sq.t()
        return dim, rows, grad, exp_avg, exp_avg_sq


@dataclass
class GroupStep:
    """One step of one parameter group: what its parameters share."""

    group: dict[str, Any]
    scratch: ScratchPool
    background: Background
    coefficients: GroupCoefficients = field(init=False)

    def __post_init__(self) -> None:
        self.coefficients = GroupCoefficients(self.group)

    def plain(self, params: list[Tensor], states: list[State]) -> None:
        """Step parameters at full rank."""
        for p, state in zip(params, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=p.device if has_fused_adamw(p) else "cpu")
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        grads = [p.grad for p in params if p.grad is not None]
        exp_avgs, exp_avg_sqs = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        self._torch_adamw(params, grads, exp_avgs, exp_avg_sqs, [s["step"] for s in states])

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
        projector = current_projector(state)
        arguments = weight, projector, grad, state["exp_avg"], state["exp_avg_sq"], coefficients
        if group["fused"] and cpu_kernel.can_step(weight, grad, state["exp_avg"], projector):
            cpu_kernel.step_(*arguments, **self._adam)
        else:
            project_and_step_(*arguments, self.scratch.like(state["exp_avg"]), **self._adam)
        if weight.data_ptr() != p.data_ptr():  # a copy: channels_last
            p.copy_(weight.view(p.shape))

    def active(self, every: list[ActiveRows]) -> None:
        """Update active rows, write them back, choose new ones where that is due."""
        group = self.group
        begun = [item for item in every if self._begin(item)]
        if group["decay"] == "all":
            for item in begun:
                warmup = self.coefficients.warmup(item.state)
                item.layer.decay_(1 - group["lr"] * warmup * group["weight_decay"])
        rest = [item for item in begun if not (group["fused"] and self._kernel_step(item))]
        shared = [item for item in rest if self._is_torch_adamw(item)]
        if shared:
            steps = [torch.tensor(float(shared_steps(i.state) - 1), device=i.rows.device) for i in shared]
            _, rows, grads, exp_avgs, exp_avg_sqs = map(list, zip(*(i.row_major() for i in shared), strict=True))
            self._torch_adamw(rows, grads, exp_avgs, exp_avg_sqs, steps, scale=group["scale"])
        for item in rest:
            if not self._is_torch_adamw(item):
                self._rowwise_adamw(item)
            item.layer.write_back(group["seed"], item.index, item.state["step"])
        for item in begun:
            if refresh_due(item.state, group):
                carry = carry_moments(item.state, item.layer.matrix(), group, self.background)
                choose_rows(item.layer, item.state, carry, group, item.index)
            arm(item.layer, item.state, group)

    def _begin(self, item: ActiveRows) -> bool:
        """Count the step; makes the state in the first, which a fresh optimizer building its state leaves at that."""
        if not item.state:
            adopt(item.layer, item.state, carry_moments(item.state, item.layer.matrix(), self.group))
            if not self.group["lr"] and not item.grad.any():
                return False
        item.state["step"] += 1
        return True

    def _is_torch_adamw(self, item: ActiveRows) -> bool:
        """Whether these rows step as an ordinary parameter under AdamW does: of one age, in one precision."""
        return (
            "row_steps" not in item.state
            and item.rows.dtype == item.state["exp_avg"].dtype
            and self.coefficients.warmup(item.state) == 1.0
        )

    def _rowwise_adamw(self, item: ActiveRows) -> None:
        """Step rows each at its own age, or in a precision of their own."""
        arguments, coefficients = item.row_major(), self.coefficients.at(item.state)
        step_active_(*arguments, coefficients, self.scratch.like(arguments[-1]), **self._adam)

    def _kernel_step(self, item: ActiveRows) -> bool:
        """Step rows and write them back in one pass, where the CPU kernel can."""
        dim, rows, grad, exp_avg, exp_avg_sq = item.row_major()
        weight = item.layer.matrix().t() if is_column_major(item.rows) else item.layer.matrix()
        projector = Projector(item.layer.selected, None, dim)
        if dim != 0 or not rows.is_contiguous() or not cpu_kernel.can_step(weight, grad, exp_avg, projector):
            return False
        coefficients = self.coefficients.at(item.state)
        cpu_kernel.step_(weight, projector, grad, exp_avg, exp_avg_sq, coefficients, rows, **self._adam)
        return True

    def _torch_adamw(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        scale: float = 1.0,
    ) -> None:
        """AdamW by torch's own fused (CPU, CUDA) or foreach implementation; counts ``steps``."""
        if not params:
            return
        adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            fused=all(map(has_fused_adamw, params)) or None,
            amsgrad=False,
            beta1=self.group["betas"][0],
            beta2=self.group["betas"][1],
            lr=self.group["lr"] * scale,
            weight_decay=self.group["weight_decay"] / scale,  # decay is not multiplied by scale
            eps=self.group["eps"],
            maximize=self.group["maximize"],
        )

    @property
    def _adam(self) -> dict[str, Any]:
        return {key: self.group[key] for key in ("betas", "eps", "maximize")}


def has_fused_adamw(p: Tensor) -> bool:
    """Whether torch has a fused AdamW for this tensor."""
    return p.device.type in ("cpu", "cuda")
