"""Cross-entropy over a vocabulary that is spread over a row, of tokens that are spread over a column."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grass.distributed.parallel_2d.mesh import Grid, TotalSum, arrived

IGNORED = -100
"""The target of tokens that do not count, as in ``F.cross_entropy``."""


def cross_entropy(
    grid: Grid,
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    chunk_tokens: int,
    count: Tensor | int | None = None,
) -> Tensor:
    """The mean loss over the tokens of all ranks and replicas; the logits of ``chunk_tokens`` tokens exist at a time.

    Backward computes each chunk's logits once more (``torch.utils.checkpoint``).

    Args:
        grid: the ranks.
        hidden: ``(t, h/b)``.
        targets: int64 ``(t,)``, token ids or :data:`IGNORED`.
        head: ``(t, h/b) -> (t, V/b)``.
        chunk_tokens: tokens of a rank per chunk.
        count: what to divide by; ``None`` for the number of tokens that count.
    """

    def summed_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return _losses(grid, head(hidden), targets).sum()

    chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    losses = [checkpoint(summed_loss, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in chunks]
    total: Tensor = TotalSum.apply(torch.stack(losses).sum(), grid.sum_tokens)  # type: ignore[no-untyped-call]
    return total / (arrived(grid.sum_tokens((targets != IGNORED).sum())) if count is None else count)


def _losses(grid: Grid, logits: Tensor, targets: Tensor) -> Tensor:
    """Each token's loss, 0 where it does not count: ``(t, V/b), (t,) -> (t,)``; all ranks of a row have all."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = arrived(grid.max_row(logits.detach().amax(dim=1)))
    exponentials: Tensor = (logits - largest.unsqueeze(1)).exp().sum(dim=1)
    first = targets - grid.column * logits.shape[1]
    here = (first >= 0) & (first < logits.shape[1])
    of_target = logits.gather(1, first.where(here, 0).unsqueeze(1)).squeeze(1).where(here, 0.0)
    sums: Tensor = TotalSum.apply(torch.stack([exponentials, of_target]), grid.sum_row)  # type: ignore[no-untyped-call]
    return (sums[0].log() + largest - sums[1]).where(targets != IGNORED, 0.0)
