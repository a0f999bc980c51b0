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

import torch
from torch import Tensor

from grass.kernels.arithmetic import StepCoefficients, adamw_
from grass.selection.projector import Projector


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


def rows_to_step(weight: Tensor, projector: Projector, out: Tensor) -> Tensor:
    """The values to step, in ``out``: those of the chosen rows, or zeros if the rows are scaled.

    Scaled rows may repeat: each is decayed once, and the changes of all its copies are added up.
    """
    return projector.gather(weight, out=out) if projector.scale is None else out.zero_()


def put_back_(weight: Tensor, projector: Projector, rows: Tensor, shrink: float) -> None:
    """Write the stepped ``rows`` of :func:`rows_to_step` back to ``weight``."""
    if projector.scale is None:
        projector.scatter_(weight, rows)
        return
    projector.scatter_(weight, projector.gather(weight).to(rows.dtype).mul_(shrink))
    projector.add_to_(weight, rows)
