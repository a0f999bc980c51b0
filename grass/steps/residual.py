r"""The residual: the rows that were not chosen move along their gradient, without any state of their own.

With ``D`` the AdamW direction of the chosen rows ``sigma`` and ``G[sigma]`` their gradient, both ``(r, n)``::

    phi_j = |D[:, j]| / |G[sigma, j]|                 how AdamW scales column j, seen over the chosen rows
    U_i   = phi * G_i                                 of a row i that was not chosen, scaled likewise
    W_i  <- W_i - lr scale U_i / |U_i| mean_k |D_k|   as far as the chosen rows move on average

``dim=1`` swaps rows and columns. Scaling the rest of the gradient like its low-rank part is Fira's (Chen et al., 2024,
arXiv 2410.01623, section 4). Where Fira limits the growth of the whole residual's norm from step to step, here every
row has its length set, as AdamW does for the rows that it has moments of; ``docs/quality.md`` compares the two.

By torch's operators, with one temporary ``(m, n)``; what :class:`grass.cpu_kernel.Batch` takes it moves in the call
that steps the chosen rows. Floor there, ``dim=1``, float32: ``G`` read twice, ``W`` and both moments read and written
once, ``16mn + 16mr`` bytes, where AdamW moves ``28mn`` (``dim=0`` reads ``G`` once). LLaMA 350m at r = 1/8 took 90 ms;
its floor at the rate of torch's fused AdamW (116 ms) is 75 (``benchmarks/optimizer_step.csv``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from grass import kernels
from grass.functional import StepCoefficients
from grass.precision import add_product_, read_moments
from grass.shards import summed
from grass.steps.group import GroupStep, Numbers
from grass.steps.rows import Rows


def step_residual(step: GroupStep, rows: Rows, numbers: Numbers) -> None:
    """Move the rows of a weight that were not chosen; call it after the chosen ones have been stepped."""
    assert rows.residual is not None
    weight, projector, dim = rows.stepped(), rows.projector(), rows.dim
    direction = _direction(step, rows, numbers.row_steps)
    factors = _quotients(_norms(direction, 1 - dim), _norms(projector.gather(rows.grad), 1 - dim))
    rest = torch.mul(rows.grad, factors.unsqueeze(dim), out=_scratch(step, weight, factors))
    squares = torch.cat([_norms(rest, dim), _norms(direction, dim)]).square()
    norms = summed(squares, rows.residual).sqrt()
    lengths, chosen = torch.split(norms, [weight.shape[dim], len(rows.indices)])
    coefficients = _quotients(chosen.mean(), lengths).index_fill(0, rows.indices, 0.0)
    size = -numbers.step_size if step.group["maximize"] else numbers.step_size
    add_product_(weight, rest, projector.along(coefficients), -size, step.value_key(rows.index, rows.state))


def _direction(step: GroupStep, rows: Rows, row_steps: Tensor | int) -> Tensor:
    """``D (r, n)``, from moments that this step has updated."""
    exp_avg, exp_avg_sq = read_moments(rows.state)
    c = StepCoefficients.at(row_steps, 1.0, step.group["betas"]).along(rows.dim)
    root = exp_avg_sq.sqrt().div_(c.denominator).add_(step.group["eps"]).div_(c.step_size)
    return torch.div(exp_avg, root, out=root)


def _norms(matrix: Tensor, dim: int) -> Tensor:
    norms: Tensor = kernels.row_norms(matrix, dim)
    return norms


def _quotients(norms: Tensor, by: Tensor) -> Tensor:
    """0 where it would be divided by nothing."""
    return torch.where(by > 0, norms / by, 0.0)


def _scratch(step: GroupStep, weight: Tensor, factors: Tensor) -> Tensor | None:
    return step.scratch.like(2, [weight])[0] if weight.dtype == factors.dtype else None
