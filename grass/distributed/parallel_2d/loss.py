"""Cross-entropy over a vocabulary that is spread over a row, of tokens that are spread over a column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grass.distributed.parallel_2d.layers import Linear2D, autocast_to, local_part, vector
from grass.distributed.parallel_2d.mesh import WEIGHT, Gathered, Grid, TotalSum, arrived
from grass.labels import IGNORED
from grass.private_names import assert_async


def cross_entropy(
    grid: Grid,
    hidden: Tensor,
    targets: Tensor,
    head: nn.Module,
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
        head: ``(t, h/b) -> (t, V/b)``. Its weights travel once, not once for each chunk.
        chunk_tokens: tokens of a rank per chunk.
        count: what to divide by; ``None`` for the number of tokens that count.
    """

    logits_of = _gathered(head, grid, hidden) if type(head) is Linear2D else head
    if type(head) is not Linear2D and grid.replicas is not None:
        chunk_tokens = len(hidden)  # chunks of a converted head are summed one by one, of all replicas together

    def summed_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return _losses(grid, logits_of(hidden), targets).sum()

    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    losses = [checkpoint(summed_loss, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in chunks]
    total: Tensor = TotalSum.apply(torch.stack(losses).sum(), grid.sum_tokens)  # type: ignore[no-untyped-call]
    return total / (arrived(grid.sum_tokens((targets != IGNORED).sum())) if count is None else count)


def _gathered(head: Any, grid: Grid, hidden: Tensor) -> Callable[[Tensor], Tensor]:
    """The head with its column's weights, ``V/b`` outputs of all ``h`` features."""
    _, weight = autocast_to(hidden, local_part(head.weight, WEIGHT))

    def summed(every: Tensor) -> Tensor:
        return grid.sum_replicas(grid.scatter_column(every))

    gathered: Tensor = Gathered.apply(weight, grid.gather_column, summed)  # type: ignore[no-untyped-call]
    bias = None if head.bias is None else vector(head, "bias")

    def logits_of(hidden: Tensor) -> Tensor:
        x, weight = autocast_to(hidden, gathered)
        whole: Tensor = Gathered.apply(x, grid.gather_row, grid.scatter_row)  # type: ignore[no-untyped-call]
        return F.linear(whole, weight, bias)

    return logits_of


def _losses(grid: Grid, logits: Tensor, targets: Tensor) -> Tensor:
    """Each token's loss, 0 where it does not count: ``(t, V/b), (t,) -> (t,)``; all ranks of a row have all."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = arrived(grid.max_row(logits.detach().amax(dim=1)))
    exponentials: Tensor = (logits - largest.unsqueeze(1)).exp().sum(dim=1)
    inside = (targets == IGNORED) | ((targets >= 0) & (targets < logits.shape[1] * grid.columns))
    assert_async(inside.all(), f"Labels must be token ids or {IGNORED}")
    first = targets - grid.column * logits.shape[1]
    here = (first >= 0) & (first < logits.shape[1])
    of_target = logits.gather(1, first.where(here, 0).unsqueeze(1)).squeeze(1).where(here, 0.0)
    sums: Tensor = TotalSum.apply(torch.stack([exponentials, of_target]), grid.sum_row)  # type: ignore[no-untyped-call]
    return (sums[0].log() + largest - sums[1]).where(targets != IGNORED, 0.0)
