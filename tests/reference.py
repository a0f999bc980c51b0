"""Slow, readable references that share no code with the package."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def dense_projection(indices: Tensor, scale: Tensor | None, size: int) -> Tensor:
    """``P (size, r)`` as a matrix: column ``j`` is ``rho_j`` times the unit vector of ``indices[j]``."""
    p = torch.zeros(size, len(indices), dtype=torch.float64)
    for j, row in enumerate(indices.tolist()):
        p[row, j] = 1.0 if scale is None else float(scale[j])
    return p


def compact_adamw(
    weight: Tensor,
    indices: Tensor,
    rho: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    row_steps: Sequence[int],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    decay: str = "selected",
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step on rows (``dim=0``), element by element in Python floats. Returns new (weight, exp_avg, exp_avg_sq)."""
    beta1, beta2 = betas
    w, m, v = (t.double().clone() for t in (weight, exp_avg, exp_avg_sq))
    decayed = range(w.shape[0]) if decay == "all" else set(indices.tolist())
    for row in decayed:
        w[row] *= 1 - lr * weight_decay
    for j, row in enumerate(indices.tolist()):
        rho_j = 1.0 if rho is None else float(rho[j])
        for k in range(w.shape[1]):
            g = float(grad[j, k]) * (-1 if maximize else 1)
            m[j, k] = beta1 * m[j, k] + (1 - beta1) * g
            v[j, k] = beta2 * v[j, k] + (1 - beta2) * g * g
            m_hat = float(m[j, k]) / (1 - beta1 ** row_steps[j])
            v_hat = float(v[j, k]) / (1 - beta2 ** row_steps[j])
            w[row, k] -= lr * scale * rho_j * m_hat / (math.sqrt(v_hat) + eps)
    return w, m, v


class ReferenceGrass:
    """Grass on one matrix, in float64, with full-size moments of the plain gradient, unscaled by ``rho``.

    In these units the policies are one line each: a slot's moments are ``rho M`` and ``rho^2 V`` whatever its ``rho``,
    and two slots of one row share them. Rows are told from outside, once per interval.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        dim: int,
        update_interval: int,
        state_policy: str = "reset",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        scale: float = 1.0,
        warmup_after_refresh: int = 0,
        maximize: bool = False,
        decay: str = "selected",
    ) -> None:
        self.dim = dim
        self.w = self._by_row(weight).double().clone()
        self.m, self.v = torch.zeros_like(self.w), torch.zeros_like(self.w)
        self.row_steps = [0] * len(self.w)
        self.interval, self.policy, self.warmup = update_interval, state_policy, warmup_after_refresh
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.scale, self.maximize, self.decay = scale, maximize, decay
        self.steps = 0
        self.explored: list[int] = []
        self.reach = 1.0
        self.turns = 1.0
        self.rows: list[int] = []
        self.rho: list[float] = []

    def _by_row(self, matrix: Tensor) -> Tensor:
        return matrix.detach() if self.dim == 0 else matrix.detach().T

    @property
    def weight(self) -> Tensor:
        """The matrix in its own orientation."""
        return self.w if self.dim == 0 else self.w.T

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step chooses rows: steps 1, K + 1, 2K + 1, ..."""
        return self.steps % self.interval == 0

    def choose(self, indices: Tensor, rho: Tensor | None) -> None:
        """Take the rows for the coming interval and do to the moments what the policy says."""
        rows = indices.tolist()
        kept = {"reset": set(), "keep": set(self.rows) & set(rows), "bank": set(range(len(self.w)))}[self.policy]
        for row in set(range(len(self.w))) - kept:
            self.m[row], self.v[row], self.row_steps[row] = 0.0, 0.0, 0
        self.rows, self.rho = rows, [1.0] * len(rows) if rho is None else rho.double().tolist()

    def step(self, grad: Tensor) -> None:
        """One step; ``choose`` was called before where a refresh was due."""
        g = self._by_row(grad).double() * (-1 if self.maximize else 1)
        since_refresh, first_selection = self.steps % self.interval + 1, self.steps < self.interval
        lr = self.lr * (1.0 if first_selection or not self.warmup else min(1.0, since_refresh / self.warmup))
        beta1, beta2 = self.betas
        for row in range(len(self.w)) if self.decay == "all" else set(self.rows):
            self.w[row] *= 1 - lr * self.weight_decay
        for row in self.explored if self.decay != "all" else ():
            self.w[row] *= 1 - lr * self.weight_decay * self.turns
        for row in set(self.rows):
            self.m[row] = beta1 * self.m[row] + (1 - beta1) * g[row]
            self.v[row] = beta2 * self.v[row] + (1 - beta2) * g[row] ** 2
            self.row_steps[row] += 1
        before = self.w.clone()
        for row, rho in zip(self.rows, self.rho, strict=True):
            m_hat = rho * self.m[row] / (1 - beta1 ** self.row_steps[row])
            v_hat = rho**2 * self.v[row] / (1 - beta2 ** self.row_steps[row])
            self.w[row] -= lr * self.scale * rho * m_hat / (v_hat.sqrt() + self.eps)
        if self.explored and lr * self.scale:
            self._explore(g, (before - self.w) / (lr * self.scale), lr * self.scale * self.reach)
        self.steps += 1

    def _explore(self, g: Tensor, direction: Tensor, size: float) -> None:
        """Column by column scaled as the selected rows are; row by row as long as those on average, times the reach."""
        factors = [direction[self.rows, j].norm() / g[self.rows, j].norm() for j in range(g.shape[1])]
        length = sum(float(direction[row].norm()) for row in self.rows) / len(self.rows)
        for row in self.explored:
            along = torch.stack(factors) * g[row]
            self.w[row] -= size * length * along / along.norm()


def uneven_gradients(shape: tuple[int, ...], steps: int, seed: int = 0) -> Iterator[Tensor]:
    """Gradients whose large rows and columns differ from step to step, so that a refresh changes the selection."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        entries = torch.randn(shape, generator=generator, dtype=torch.float64)
        for axis, size in enumerate(shape):
            spread = torch.randn(size, generator=generator, dtype=torch.float64).exp()
            entries = entries * spread.view([-1 if a == axis else 1 for a in range(len(shape))])
        yield entries


def run(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> None:
    """Step through given gradients: one sequence per step, one tensor per parameter."""
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(parameter.dtype).clone()
        optimizer.step()


def gradients_for(parameters: Sequence[Tensor], steps: int, seed: int = 0) -> list[list[Tensor]]:
    """Arguments for :func:`run`."""
    streams = [uneven_gradients(tuple(p.shape), steps, seed + i) for i, p in enumerate(parameters)]
    return [list(step) for step in zip(*streams, strict=True)]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]) -> list[float]:
    """An ordinary training loop on a causal language model; returns the losses."""
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def assert_same_state(actual: dict, expected: dict) -> None:
    """Two optimizer ``state_dict``s are equal to the bit, with equal dtypes."""
    for ours, theirs in zip(actual["param_groups"], expected["param_groups"], strict=True):
        assert ours == theirs
    assert actual["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert actual["state"][index].keys() == state.keys()
        for key, value in state.items():
            other = actual["state"][index][key]
            assert type(other) is type(value), (index, key)
            if isinstance(value, Tensor):
                assert other.dtype == value.dtype, (index, key)
                assert torch.equal(other, value), (index, key)
            else:
                assert other == value, (index, key)
