"""Variants of Grass under trial, in one short optimizer over full gradients and full-size moments.

Without any option it computes what dense ``GrassAdamW`` with ``state_policy="bank"`` does, but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grass import param_groups
from grass.hyperparameters import resolve_dim, resolve_rank
from grass.moment_codes import decode_moment, encode_moment
from grass.selection import select_rows, selection_generator
from grass.training.optimizers import OPTIMIZERS, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class PrototypeConfig(OptimizerConfig):
    """Options under trial.

    Attributes:
        strength: of the residual, relative to the mean length of the chosen rows; 0 is none.
        phi: what scales the rest of the gradient along the other dimension: ``"ratio"``, as built; ``"second"``, the
            inverse root of the chosen rows' mean second moment; ``"none"``; ``"sign"``, signs instead of entries.
        rare: move the rest in the steps that choose rows only.
        rare_sum: ... by the sum of the gradients since the last time, not by that of this step.
        age_power: ``a`` in ``q_i ~ norm_i (1 + idle_i / K)^a``.
        norm_ema: decay of an average of the norms over refreshes.
        sum_steps: choose from the norms of the gradient summed over so many steps.
        lag: choose rows from the gradient of the step before.
        late_interval: the interval reached at the end, geometrically from ``update_interval``; 0 is constant.
        total_steps: of the run, for ``late_interval``.
        momentum: of a row chosen again: ``"keep"``, or ``"reset"``: zero, with bias correction from the start.
        bank_8bit: moments of rows that leave the selection pass through 8-bit codes.
        nesterov: AdamW's direction looks one step ahead, as NAdam's, in chosen rows.
    """

    strength: float = 1.0
    phi: str = "ratio"
    rare: bool = False
    rare_sum: bool = False
    age_power: float = 0.0
    norm_ema: float = 0.0
    sum_steps: int = 1
    lag: bool = False
    late_interval: int = 0
    total_steps: int = 540
    nesterov: bool = False
    momentum: str = "keep"
    bank_8bit: bool = False


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
                    p.sub_(group["lr"] * self._direction(p.grad, state["m"], state["v"], age, age)[0])
                else:
                    self._projected(p, state, group, index)
                index += 1

    def _projected(self, p: Tensor, state: dict[str, Any], group: dict[str, Any], index: int) -> None:
        config = self.config
        dim = resolve_dim(config.dim, p)
        grad, weight = p.grad.movedim(dim, 0), p.movedim(dim, 0)
        chose = self._choose(grad, state, group, index)
        rows = state["rows"]
        state["age"][rows] += 1
        state["age_m"][rows] += 1
        compact = grad[rows]
        m, v = state["m"].movedim(dim, 0), state["v"].movedim(dim, 0)
        m_rows, v_rows = m[rows], v[rows]
        ages = state["age_m"][rows, None], state["age"][rows, None]
        update, second = self._direction(compact, m_rows, v_rows, *ages, config.nesterov)
        m[rows], v[rows] = m_rows, v_rows
        size = group["lr"] * (1.0 if config.scale is None else config.scale)
        weight[rows] -= size * update
        if config.rare_sum:
            state["rest"] = state.get("rest", 0) + grad
        if config.strength and (chose or not config.rare):
            rest = state.pop("rest") if config.rare_sum else grad
            weight -= size * config.strength * self._residual(rest, compact, update, second, rows)

    def _residual(self, grad: Tensor, compact: Tensor, update: Tensor, second: Tensor, rows: Tensor) -> Tensor:
        match self.config.phi:
            case "ratio":
                rest = grad * (update.norm(dim=0) / compact.norm(dim=0).clamp(min=1e-30))
            case "second":
                rest = grad / second.mean(0).sqrt().clamp(min=1e-30)
            case "sign":
                rest = grad.sign()
            case _:
                rest = grad.clone()
        rest[rows] = 0
        return rest * (update.norm(dim=1).mean() / rest.norm(dim=1, keepdim=True).clamp(min=1e-30))

    def _choose(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any], index: int) -> bool:
        config, size = self.config, len(grad)
        if "age" not in state:
            state.update(age=torch.zeros(size), age_m=torch.zeros(size), idle=torch.zeros(size), refreshes=0, next=1)
            state.update(sum=torch.zeros_like(grad), norms=None, last=None)
        state["idle"] += 1
        if state["step"] > state["next"] - config.sum_steps:
            state["sum"] += grad
        chose = state["step"] >= state["next"]
        if chose:
            source = state["last"] if config.lag and state["last"] is not None else state["sum"]
            norms = source.norm(dim=1).double()
            if state["norms"] is not None:
                norms = torch.lerp(norms, state["norms"], config.norm_ema)
            state["norms"] = norms
            state["sum"].zero_()
            interval = self._interval(state)
            weights = norms * (1 + state["idle"] / interval) ** config.age_power
            generator = selection_generator(config.seed, index, state["refreshes"])
            rank = resolve_rank(group["rank"], size)
            rows = select_rows(weights, rank, config.selection, generator).indices
            if config.bank_8bit and "rows" in state:
                gone = torch.tensor(sorted(set(state["rows"].tolist()) - set(rows.tolist())))
                for key, signed in (("m", True), ("v", False)):
                    moment = state[key].movedim(resolve_dim(config.dim, state[key]), 0)
                    moment[gone] = coded(moment[gone], signed)
            if config.momentum == "reset" and "rows" in state:
                fresh = torch.ones(size, dtype=torch.bool)
                fresh[state["rows"]] = False
                state["age_m"][fresh] = 0
                state["m"].movedim(resolve_dim(config.dim, state["m"]), 0)[fresh] = 0
            state.update(rows=rows, refreshes=state["refreshes"] + 1, next=state["step"] + interval)
        if config.lag:
            state["last"] = grad.clone()
        state["idle"][state["rows"]] = 0
        return chose

    def _interval(self, state: dict[str, Any]) -> int:
        config = self.config
        interval = 25 if config.update_interval is None else config.update_interval
        if not config.late_interval:
            return interval
        return round(interval * (config.late_interval / interval) ** (state["step"] / config.total_steps))

    def _direction(self, grad: Tensor, m: Tensor, v: Tensor, age_m: Any, age: Any, nesterov: bool = False) -> tuple[Tensor, Tensor]:
        """AdamW's direction, and the second moment without its bias."""
        beta1, beta2 = self.config.betas
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        first = m / (1 - beta1**age_m)
        if nesterov:
            first = beta1 * first + (1 - beta1) * grad
        second = v / (1 - beta2**age)
        return first / (second.sqrt() + self.config.eps), second


def build(model: nn.Module, config: Any) -> Optimizer:
    """The prototype over the weights that all low-rank methods project."""
    groups = [
        {"params": [p for _, p in group["params"]], "rank": group.get("rank")}
        for group in param_groups(model, config.rank)
    ]
    return PrototypeGrass(groups, config)


OPTIMIZERS["prototype"] = build


def coded(moment: Tensor, signed: bool) -> Tensor:
    """What is left of a moment that 8-bit codes have held."""
    bits = torch.randint(2**32, (moment.numel(),))
    return decode_moment(*encode_moment(moment.contiguous(), signed, bits), signed)
