"""AdamW's arithmetic on matrices by torch's operators: the reference of the kernels, and their twin elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepCoefficients:
    """The coefficients of one step: scalars, or vectors over the rows if rows differ in step count.

    Attributes:
        step_size: ``lr scale / (1 - beta1^t)``.
        denominator: ``sqrt(1 - beta2^t)``.
    """

    step_size: Tensor
    denominator: Tensor

    @classmethod
    def at(cls, row_steps: Tensor | float, step_size: Tensor | float, betas: tuple[float, float]) -> StepCoefficients:
        """Coefficients of step ``row_steps >= 1``, a number where all rows share it, else float ``(r,)``.

        Args:
            row_steps: Adam steps of the rows, the coming one included.
            step_size: ``lr scale``, a number or ``(r,)``.
            betas: decay rates of the moments.
        """
        steps = row_steps
        if not isinstance(steps, Tensor):
            steps = torch.tensor(float(steps), dtype=torch.float64, device="cpu")
        return cls(step_size / _bias_correction(steps, betas[0]), _bias_correction(steps, betas[1]).sqrt())

    def along(self, dim: int) -> StepCoefficients:
        """The same with vectors over the rows shaped to broadcast over compact matrices of this ``dim``."""
        if self.step_size.ndim == 0:
            return self
        return StepCoefficients(self.step_size.unsqueeze(1 - dim), self.denominator.unsqueeze(1 - dim))


def adamw_(
    rows: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    coefficients: list[StepCoefficients],
    shrinks: list[float],
    scratch: list[Tensor] | None = None,
    *,
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
) -> None:
    """AdamW on matrices of one dtype each with its gradient and moments; updates rows and moments in place.

    For the selected rows ``W`` of a weight, their gradient ``G`` and each row's own step count ``t`` (Muhamed et al.,
    2024, Algorithm 1, with the bias correction and decoupled decay of AdamW)::

        M <- beta1 M + (1 - beta1) G
        V <- beta2 V + (1 - beta2) G^2
        W <- (1 - lr weight_decay) W - lr scale (M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps)

    Args:
        rows: the values to step.
        grads: their gradients, left as they are unless they are the ``scratch``.
        exp_avgs: first moments.
        exp_avg_sqs: second moments.
        coefficients: of each matrix, shaped to broadcast over it.
        shrinks: ``1 - lr weight_decay`` for each.
        scratch: what to compute in, shaped like ``rows``; may be ``grads``.
        betas: decay rates of the moments.
        eps: added to the denominator.
        maximize: ascend.
    """
    if maximize:
        grads = list(torch._foreach_neg(grads))
    torch._foreach_lerp_(exp_avgs, grads, 1 - betas[0])
    torch._foreach_mul_(exp_avg_sqs, betas[1])
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - betas[1])
    roots = [torch.sqrt(v, out=out) for v, out in zip(exp_avg_sqs, scratch or map(torch.empty_like, rows), strict=True)]
    torch._foreach_div_(roots, [c.denominator for c in coefficients])
    torch._foreach_add_(roots, eps)
    torch._foreach_div_(roots, [c.step_size for c in coefficients])
    torch._foreach_mul_(rows, shrinks)
    torch._foreach_addcdiv_(rows, exp_avgs, roots, -1.0)


def _bias_correction(steps: Tensor, beta: float) -> Tensor:
    """``1 - beta^steps`` without the cancellation that costs float32 four digits at ``beta = 0.999``."""
    return -torch.expm1(steps * (math.log(beta) if beta > 0 else -math.inf))
