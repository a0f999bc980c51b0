r"""Compact AdamW as pure functions: no optimizer, no module, only tensors.

For the chosen rows ``sigma`` of a weight ``W``, with the compact gradient ``G = P^T grad`` and each row's own step
count ``t`` (Muhamed et al., 2024, Algorithm 1, with the bias correction and decoupled decay of AdamW)::

    M <- beta1 M + (1 - beta1) G
    V <- beta2 V + (1 - beta2) G^2
    D  = (M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps)
    W[sigma] <- (1 - lr weight_decay) W[sigma]
    W <- W - lr scale P D
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grass.projector import Projector


@dataclass(frozen=True)
class StepCoefficients:
    """What one step multiplies by: scalars, or vectors over the rows where rows differ in step count.

    Attributes:
        step_size: ``lr scale / (1 - beta1^t)``.
        denominator: ``sqrt(1 - beta2^t)``.
        shrink: ``1 - lr weight_decay``, by which the chosen rows decay.
    """

    step_size: Tensor
    denominator: Tensor
    shrink: Tensor

    @classmethod
    def at(
        cls,
        row_steps: Tensor | int,
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        scale: float = 1.0,
        weight_decay: float = 0.0,
    ) -> StepCoefficients:
        """Coefficients of step ``row_steps >= 1``: an ``int`` where all rows share it, else float ``(r,)``."""
        steps = row_steps if isinstance(row_steps, Tensor) else torch.tensor(float(row_steps), dtype=torch.float64)
        step_size = lr * scale / _bias_correction(steps, betas[0])
        denominator = _bias_correction(steps, betas[1]).sqrt()
        return cls(step_size, denominator, torch.as_tensor(1 - lr * weight_decay, dtype=torch.float64))

    def along(self, dim: int) -> StepCoefficients:
        """The same with vectors over the rows shaped to broadcast over compact matrices of this ``dim``."""
        if self.step_size.ndim == 0:
            return self
        step_size, denominator = self.step_size.unsqueeze(1 - dim), self.denominator.unsqueeze(1 - dim)
        return StepCoefficients(step_size, denominator, self.shrink)


Scratch = tuple[Tensor | None, Tensor | None]
"""Two buffers shaped like the compact gradient, in the dtype of the moments, or ``None`` to allocate as needed."""
NO_SCRATCH: Scratch = (None, None)


class ScratchPool:
    """Hands the same two buffers to one weight after another.

    Without them the temporaries of a step cost more on a CPU than its arithmetic: fresh memory faults in page by page.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def like(self, compact: Tensor) -> Scratch:
        """Uninitialised buffers of the shape, strides, dtype and device of ``compact``, which is dense."""
        return self._take(0, compact), self._take(1, compact)

    def _take(self, slot: int, compact: Tensor) -> Tensor:
        key = (slot, compact.dtype, compact.device)
        if key not in self._buffers or self._buffers[key].numel() < compact.numel():
            self._buffers[key] = torch.empty(compact.numel(), dtype=compact.dtype, device=compact.device)
        return self._buffers[key].as_strided(compact.shape, compact.stride())


def compact_adamw(
    weight: Tensor,
    projector: Projector,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    row_steps: Tensor | int,
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    scale: float = 1.0,
    decay: str = "selected",
    maximize: bool = False,
) -> None:
    """One AdamW step on the chosen rows of ``weight``; updates ``weight``, ``exp_avg`` and ``exp_avg_sq`` in place.

    Args:
        weight: ``(m, n)``.
        projector: the chosen rows. Without a scale its rows are distinct; with one, repeated rows add up.
        grad: ``P^T grad``, ``(r, n)`` for ``dim=0``, ``(m, r)`` for ``dim=1``; left as it is.
        exp_avg: first moment, shaped like ``grad``; its dtype is that of the arithmetic.
        exp_avg_sq: second moment, likewise.
        row_steps: Adam steps of the rows, this one included: an ``int``, or float ``(r,)`` where they differ.
        lr: learning rate, a number or a 0-dim tensor.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled decay rate, per unit of ``lr``; not multiplied by ``scale``.
        scale: multiplies the update (``alpha`` in the paper).
        decay: ``"selected"`` decays the rows that move, each once; ``"all"`` decays the whole weight.
        maximize: ascend.
    """
    coefficients = StepCoefficients.at(row_steps, lr=lr, betas=betas, scale=scale, weight_decay=weight_decay)
    if decay == "all":
        coefficients = decay_all_(weight, coefficients)
    adamw_rows_(
        weight, projector, grad, exp_avg, exp_avg_sq, coefficients, NO_SCRATCH, betas=betas, eps=eps, maximize=maximize
    )


def decay_all_(weight: Tensor, coefficients: StepCoefficients) -> StepCoefficients:
    """Decay the whole ``weight`` in place; returns the coefficients with which its rows do not decay again."""
    weight.mul_(coefficients.shrink)
    return StepCoefficients(coefficients.step_size, coefficients.denominator, torch.ones(()))


def adamw_rows_(
    weight: Tensor,
    projector: Projector,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coefficients: StepCoefficients,
    scratch: Scratch,
    *,
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
) -> None:
    """:func:`compact_adamw` with the coefficients at hand; ``grad`` may lie in ``scratch[0]``."""
    c = coefficients.along(projector.dim)
    update = adam_direction_(
        grad, exp_avg, exp_avg_sq, c.denominator, scratch[1], betas=betas, eps=eps, maximize=maximize
    )
    update.mul_(c.step_size)
    rows = projector.gather(weight, out=scratch[0]).to(update.dtype).mul_(c.shrink)
    if projector.scale is None:
        projector.scatter_(weight, rows.sub_(update))
    else:
        projector.scatter_(weight, rows)
        projector.add_to_(weight, update, alpha=-1.0)


def adam_direction_(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    denominator: Tensor,
    out: Tensor | None = None,
    *,
    betas: tuple[float, float],
    eps: float,
    maximize: bool = False,
) -> Tensor:
    """Update the moments in place and return ``M / (sqrt(V) / denominator + eps)``, in ``out`` where given."""
    grad = grad.to(exp_avg.dtype)
    grad = -grad if maximize else grad
    exp_avg.lerp_(grad, 1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    root = torch.sqrt(exp_avg_sq, out=out).div_(denominator).add_(eps)
    return torch.div(exp_avg, root, out=root)


def project_and_step_(
    weight: Tensor,
    projector: Projector,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coefficients: StepCoefficients,
    scratch: Scratch = NO_SCRATCH,
    **hyperparameters: Any,
) -> None:
    """:func:`adamw_rows_` from the full ``(m, n)`` gradient."""
    compact = projector.rescale(projector.gather(grad, out=scratch[0]))
    adamw_rows_(weight, projector, compact, exp_avg, exp_avg_sq, coefficients, scratch, **hyperparameters)


def step_active_(
    dim: int,
    active: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coefficients: StepCoefficients,
    scratch: Scratch = NO_SCRATCH,
    *,
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
) -> None:
    """The step of :func:`adamw_rows_` on rows held in a tensor of their own, ``active (r, n)`` or ``(m, r)``."""
    c = coefficients.along(dim)
    update = adam_direction_(
        grad, exp_avg, exp_avg_sq, c.denominator, scratch[1], betas=betas, eps=eps, maximize=maximize
    )
    update.mul_(c.step_size)
    if active.dtype == update.dtype:
        active.mul_(c.shrink).sub_(update)
    else:
        active.copy_(active.to(update.dtype).mul_(c.shrink).sub_(update))


def _bias_correction(steps: Tensor, beta: float) -> Tensor:
    """``1 - beta^steps`` without the cancellation that costs float32 four digits at ``beta = 0.999``."""
    return -torch.expm1(steps * (math.log(beta) if beta > 0 else -math.inf))
