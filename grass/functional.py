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

import torch
from torch import Tensor

from grass.projector import Projector


@dataclass(frozen=True)
class StepCoefficients:
    """What one step multiplies by: scalars, or vectors over the rows where rows differ in step count.

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
        steps = row_steps if isinstance(row_steps, Tensor) else torch.tensor(float(row_steps), dtype=torch.float64)
        return cls(step_size / _bias_correction(steps, betas[0]), _bias_correction(steps, betas[1]).sqrt())

    def along(self, dim: int) -> StepCoefficients:
        """The same with vectors over the rows shaped to broadcast over compact matrices of this ``dim``."""
        if self.step_size.ndim == 0:
            return self
        return StepCoefficients(self.step_size.unsqueeze(1 - dim), self.denominator.unsqueeze(1 - dim))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill one block of memory: no gaps, as between columns, and no overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class ScratchPool:
    """Hands the same memory to one list of weights after another.

    Without it the temporaries of a step cost more on a CPU than its arithmetic: fresh memory faults in page by page.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def like(self, slot: int, compacts: list[Tensor]) -> list[Tensor]:
        """Uninitialised tensors of the shapes, dtype and device of ``compacts``, which share one dtype.

        They have the strides of :func:`is_dense` tensors and are row-major otherwise. The next call with the same
        ``slot`` reuses their memory.
        """
        key, size = (slot, compacts[0].dtype, compacts[0].device), sum(t.numel() for t in compacts)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=key[1], device=key[2])
        views, offset = [], 0
        for t in compacts:
            stride = t.stride() if is_dense(t) else torch.empty(t.shape, device="meta").stride()
            views.append(self._buffers[key].as_strided(t.shape, stride, offset))
            offset += t.numel()
        return views


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
    """What a step of the chosen rows changes, in ``out``: their values, if scaled zeros to which their changes add up.

    Scaled rows may repeat: each is decayed once, and the changes of all its repetitions are added.
    """
    return projector.gather(weight, out=out) if projector.scale is None else out.zero_()


def put_back_(weight: Tensor, projector: Projector, rows: Tensor, shrink: float) -> None:
    """Write the stepped ``rows`` of :func:`rows_to_step` to where they came from."""
    if projector.scale is None:
        projector.scatter_(weight, rows)
        return
    projector.scatter_(weight, projector.gather(weight).to(rows.dtype).mul_(shrink))
    projector.add_to_(weight, rows)


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
