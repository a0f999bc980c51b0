"""When swaps with the moments bank happen, and the exchange between ranks that share a bank."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from grass.batches import batches
from grass.parallel.background import Background
from grass.parallel.ranks import Ranks
from grass.parallel.shards import is_sharded
from grass.state.bank import Share, Swap
from grass.state.moments import Moments

BATCH = 64 * 2**20
"""Bytes to receive from other ranks at a time: enough to pay for the call, small beside a model's gradients."""

Held = tuple[Swap, AbstractContextManager[Any]]


class BankExchange:
    """The swaps of one step of a parameter group.

    Swaps with a rank's own bank run in the ``background`` if there is one, otherwise at once. Swaps with a bank that
    ranks share run in :meth:`finish`, for all weights together: in another thread, their communication could get out
    of order with the all-reduces of the next backward.

    Args:
        ranks: the ranks that share the bank; ``Ranks(None)`` if each has its own.
        background: runs swaps during the next forward.
    """

    def __init__(self, ranks: Ranks, background: Background | None = None) -> None:
        self.ranks, self.background = ranks, background
        self._waiting: list[Held] = []

    @classmethod
    def of(cls, group: dict[str, Any], ranks: Ranks, background: Background | None = None) -> BankExchange:
        """The exchange of a parameter group."""
        return cls(ranks if shares_bank(group) else Ranks(None), background)

    def share(self, size: int) -> Share:
        """This process's share of ``size`` rows."""
        return Share.of(size, self.ranks)

    def swap(self, swap: Swap, moments: AbstractContextManager[Any]) -> None:
        """Carry out a swap, now or later. Within the context ``moments`` the state has moments in full precision."""

        def work() -> None:
            with moments:
                swap.leave()
                swap.enter(None if swap.opens else swap.withdraw())

        if self.ranks.group is not None and not swap.opens:
            self._waiting.append((swap, moments))
        elif self.background is None or swap.opens:
            work()
        else:
            self.background.run(work, swap.state, swap.weight.device)

    def finish(self) -> None:
        """Carry out the swaps that need other ranks.

        Raises:
            RuntimeError: on every rank, if the ranks have not selected the same rows.
        """
        waiting, self._waiting = self._waiting, []
        self.ranks.verify_selection([swap.new.indices for swap, _ in waiting])  # sizes depend on them
        for batch in batches(waiting, lambda item: item[0].row_bytes * item[0].entering.numel(), BATCH):
            with ExitStack() as stack:
                for swap, moments in batch:
                    stack.enter_context(moments)
                    swap.leave()
                swaps = [swap for swap, _ in batch]
                for swap, entering in zip(swaps, self._brought(swaps), strict=True):
                    swap.enter(entering)

    def _brought(self, swaps: list[Swap]) -> list[Moments]:
        """The moments of rows that enter each selection, from the ranks that hold them, in one exchange."""
        counts = [torch.bincount(swap.owners, minlength=swap.share.ranks).tolist() for swap in swaps]
        sizes = [
            [count * swap.row_bytes for count, swap in zip(of_rank, swaps, strict=True)]
            for of_rank in zip(*counts, strict=True)
        ]
        own = torch.cat([part for swap in swaps for part in _packed(swap.withdraw(), swap.new.dim)])
        device = swaps[0].weight.device
        parts = self.ranks.gather(own.to(device), [sum(of_rank) for of_rank in sizes])
        split = [torch.split(part, of_rank) for part, of_rank in zip(parts, sizes, strict=True)]
        return [
            _joined([_unpacked(piece, swap) for piece in pieces], swap.new.dim)
            for swap, pieces in zip(swaps, zip(*split, strict=True), strict=True)
        ]


def shares_bank(group: dict[str, Any]) -> bool:
    """Whether the ranks share the banks of a group. The bank of a sharded weight is sharded as the weight is."""
    return bool(group["shard_bank"]) and not any(is_sharded(p) for p in group["params"])


def _packed(moments: Moments, dim: int) -> list[Tensor]:
    """Moments as bytes: first moments row by row, then second moments, then step counts."""
    rows = [moments.exp_avg.movedim(dim, 0), moments.exp_avg_sq.movedim(dim, 0), moments.steps]
    return [part.flatten().view(torch.uint8) for part in rows]


def _unpacked(data: Tensor, swap: Swap) -> Moments:
    """The inverse of :func:`_packed`."""
    dim, dtype = swap.new.dim, swap.state["bank_exp_avg"].dtype
    rows, width = data.numel() // swap.row_bytes, swap.weight.shape[1 - swap.new.dim]
    size = rows * width * dtype.itemsize
    exp_avg, exp_avg_sq = (part.clone().view(dtype).view(rows, width) for part in data[: 2 * size].view(2, size))
    return Moments(exp_avg.movedim(0, dim), exp_avg_sq.movedim(0, dim), data[2 * size :].clone().view(torch.float32))


def _joined(parts: list[Moments], dim: int) -> Moments:
    exp_avg, exp_avg_sq, steps = map(list, zip(*parts, strict=True))
    return Moments(torch.cat(exp_avg, dim), torch.cat(exp_avg_sq, dim), torch.cat(steps))
