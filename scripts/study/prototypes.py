"""Variants of Grass under trial, in one short optimizer over full gradients and full-size moments.

Without any of the options it computes what ``GrassAdamW(state_policy="bank", selection="multinomial_norm")`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grass import param_groups
from grass.hyperparameters import resolve_dim, resolve_rank
from grass.selection import select_rows, selection_generator
from grass.training.optimizers import OPTIMIZERS, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class PrototypeConfig(OptimizerConfig):
    """Options under trial.

    Attributes:
        limiter: factor by which a weight's update may grow from step to step; 0 is off.
        limited: ``"update"`` or ``"gradient"``.
        age_power: ``a`` in ``q_i ~ norm_i (1 + age_i / K)^a``.
        norm_ema: decay of an average of the norms over refreshes.
        row_norm: normalise each row of the update to the root mean square of 1.
        momentum: of a row chosen again: ``"keep"``, ``"reset"``, or ``"ease"`` (reset without bias correction).
        sum_steps: choose from the norms of the gradient summed over so many steps.
        lag: choose rows from the gradient of the step before.
        late_interval: the interval reached at the end of the run, from ``update_interval`` at its start; 0 is constant.
        total_steps: of the run, for ``late_interval``.
    """

    limiter: float = 0.0
    limited: str = "update"
    age_power: float = 0.0
    norm_ema: float = 0.0
    row_norm: bool = False
    momentum: str = "keep"
    sum_steps: int = 1
    lag: bool = False
    late_interval: int = 0
    total_steps: int = 540
    residual: float = 0.0
    residual_limit: float = 1.01
    residual_kind: str = "channel"
    orthogonal: bool = False
    cyclic: bool = False
    nesterov: bool = True


class PrototypeGrass(Optimizer):
    """See the module; ``rank=None`` groups are plain AdamW."""

    def __init__(self, groups: list[dict[str, Any]], config: PrototypeConfig) -> None:
        self.config = config
        super().__init__(groups, {"lr": config.lr, "rank": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                if group["rank"] is None:
                    age = state["step"]
                    p.sub_(group["lr"] * self._direction(p.grad, state["m"], state["v"], age, age))
                else:
                    self._projected(p, state, group, index)
                index += 1

    def _projected(self, p: Tensor, state: dict[str, Any], group: dict[str, Any], index: int) -> None:
        config = self.config
        dim = resolve_dim(config.dim, p)
        grad, weight = p.grad.movedim(dim, 0), p.movedim(dim, 0)
        self._choose(grad, state, group, index)
        rows = state["rows"]
        state["age_m"][rows] += 1
        state["age_v"][rows] += 1
        compact = grad[rows]
        if config.limited == "gradient":
            self._limit(compact, state)
        m, v = state["m"].movedim(dim, 0), state["v"].movedim(dim, 0)
        m_rows, v_rows = m[rows], v[rows]
        age_m = state["age_m"][rows, None]
        if config.momentum == "ease":
            age_m = torch.full_like(age_m, 1e9)
        update = self._direction(compact, m_rows, v_rows, age_m, state["age_v"][rows, None])
        m[rows], v[rows] = m_rows, v_rows
        if config.orthogonal:
            flat = m_rows if not config.nesterov else torch.lerp(compact, m_rows, config.betas[0])
            update = newton_schulz(flat) * 0.2 * max(flat.shape) ** 0.5
        if config.row_norm:
            update /= update.square().mean(1, keepdim=True).sqrt().clamp(min=1e-8)
        if config.limited == "update":
            self._limit(update, state)
        scale = 1.0 if config.scale is None else config.scale
        weight[rows] -= group["lr"] * scale * update
        if config.residual:
            factor = update.norm(dim=0) / (compact.norm(dim=0) + 1e-8)
            if config.residual_kind == "column":
                size = update.norm(dim=1).mean()
                rest = grad * (size / (grad.norm(dim=1, keepdim=True) + 1e-12))
            elif config.residual_kind == "both":
                rest = grad * factor
                size = update.norm(dim=1).mean()
                rest = rest * (size / (rest.norm(dim=1, keepdim=True) + 1e-12))
            else:
                rest = grad * factor
            rest[rows] = 0
            norm = rest.norm()
            if "rest_norm" in state:
                limiter = torch.clamp(norm / (state["rest_norm"] + 1e-8), min=config.residual_limit) / config.residual_limit
                rest /= limiter
                norm = norm / limiter
            state["rest_norm"] = norm
            weight -= group["lr"] * scale * config.residual * rest

    def _choose(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any], index: int) -> None:
        config, size = self.config, len(grad)
        if "age_v" not in state:
            state.update(age_m=torch.zeros(size), age_v=torch.zeros(size), idle=torch.zeros(size), refreshes=0, next=1)
            state.update(sum=torch.zeros_like(grad), norms=None, last=None)
        state["idle"] += 1
        if state["step"] > state["next"] - config.sum_steps:
            state["sum"] += grad
        if state["step"] >= state["next"]:
            source = state["last"] if config.lag and state["last"] is not None else state["sum"]
            norms = source.norm(dim=1).double()
            if state["norms"] is not None:
                norms = torch.lerp(norms, state["norms"], config.norm_ema)
            state["norms"] = norms
            state["sum"].zero_()
            weights = norms * (1 + state["idle"] / config.update_interval) ** config.age_power
            generator = selection_generator(config.seed, index, state["refreshes"])
            rank = resolve_rank(group["rank"], size)
            rows = select_rows(weights, rank, config.selection, generator).indices
            if config.momentum != "keep" and "rows" in state:
                fresh = torch.ones(size, dtype=torch.bool)
                fresh[state["rows"]] = False
                state["age_m"][fresh] = 0
                m = state["m"].movedim(resolve_dim(config.dim, state["m"]), 0)
                m[fresh] = 0
            state.update(rows=rows, refreshes=state["refreshes"] + 1, next=state["step"] + self._interval(state))
        if config.lag:
            state["last"] = grad.clone()
        state["idle"][state["rows"]] = 0

    def _interval(self, state: dict[str, Any]) -> int:
        config = self.config
        if not config.late_interval:
            return config.update_interval
        done = state["step"] / config.total_steps
        return round(config.update_interval * (config.late_interval / config.update_interval) ** done)

    def _limit(self, update: Tensor, state: dict[str, Any]) -> None:
        if not self.config.limiter:
            return
        norm = update.norm()
        if "norm" in state:
            limit = self.config.limiter * state["norm"]
            if norm > limit:
                update *= limit / norm
                norm = limit
        state["norm"] = norm

    def _direction(self, grad: Tensor, m: Tensor, v: Tensor, age_m: Any, age_v: Any) -> Tensor:
        beta1, beta2 = self.config.betas
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return (m / (1 - beta1**age_m)) / ((v / (1 - beta2**age_v)).sqrt() + self.config.eps)


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise, as Muon does."""
    x = matrix.bfloat16()
    transposed = x.shape[0] > x.shape[1]
    if transposed:
        x = x.mT
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if transposed else x).float()


def build(model: nn.Module, config: Any) -> Optimizer:
    """The prototype over the weights that all low-rank methods project."""
    groups = [
        {"params": [p for _, p in group["params"]], "rank": group.get("rank")}
        for group in param_groups(model, config.rank)
    ]
    return PrototypeGrass(groups, config)


OPTIMIZERS["prototype"] = build
