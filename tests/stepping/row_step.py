"""One step of one weight by the functions that the optimizer composes, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from grass.kernels.arithmetic import StepCoefficients, adamw_
from grass.selection.projector import Projector
from grass.stepping.rows import put_back_, rows_to_step


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
    lr = float(lr)
    shrink = 1 - lr * weight_decay
    if decay == "all":
        weight.mul_(shrink)
        shrink = 1.0
    coefficients = StepCoefficients.at(row_steps, lr * scale, betas).along(projector.dim)
    rows, wide = rows_to_step(weight, projector, torch.empty_like(exp_avg)), grad.to(exp_avg.dtype)
    adamw_([rows], [wide], [exp_avg], [exp_avg_sq], [coefficients], [shrink], betas=betas, eps=eps, maximize=maximize)
    put_back_(weight, projector, rows, shrink)
