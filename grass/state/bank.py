"""The moments bank: moments and step counts of the rows that are not selected, in host memory.

At a refresh, the moments of rows that leave the selection go into the bank, and those of rows that enter it come out.
Either every process holds the bank of a whole weight ``(m, n)``, or each rank holds a share of it. The ranks of
data-parallel training have the same moments of the selected rows. So a share takes what leaves without communication;
what enters comes from the rank that holds it (:mod:`grass.state.bank_exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grass.device import current_stream, has_streams
from grass.parallel.ranks import Ranks
from grass.selection.projector import Projector
from grass.state.moments import Moments, held, keep, put, source_rows
from grass.state.schema import BANKED_MOMENTS, HOST_KEYS, State


@dataclass(frozen=True)
class Share:
    """The part of ``size`` rows that one of several ranks holds.

    Ranks hold consecutive chunks of equal size; the last ones may hold fewer rows or none, as with ``torch.chunk``.
    """

    size: int
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, size: int, ranks: Ranks) -> Share:
        """The share of this process."""
        return cls(size) if ranks.group is None else cls(size, ranks.group.rank(), ranks.group.size())

    @property
    def chunk(self) -> int:
        """Rows of each rank except the last ones."""
        return -(-self.size // self.ranks)

    @property
    def start(self) -> int:
        """The first row."""
        return min(self.rank * self.chunk, self.size)

    @property
    def rows(self) -> int:
        """How many rows this rank holds."""
        return min(self.chunk, self.size - self.start)

    def of_bank(self, bank: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor of the bank, which is given whole or as this part already.

        Raises:
            ValueError: the tensor is neither.
        """
        if bank.shape[dim] == self.size:
            return bank.narrow(dim, self.start, self.rows)
        if bank.shape[dim] == self.rows:
            return bank
        raise ValueError(
            f"A moments bank of {bank.shape[dim]} rows was saved, a part of {self.size}, but rank {self.rank} of "
            f"{self.ranks} holds {self.rows}: save and load by torch.distributed.checkpoint, which puts parts together"
        )

    def owner(self, rows: Tensor) -> Tensor:
        """The rank that holds each row."""
        return rows // self.chunk


def to_host(state: State) -> None:
    """Move the bank back to host memory: after loading, Lightning moves all optimizer state to the device."""
    for key in HOST_KEYS & state.keys():
        state[key] = state[key].cpu()


@dataclass(frozen=True)
class Swap:
    """A refresh of one weight ``(m, n)`` with its bank: :meth:`leave`, then :meth:`withdraw`, then :meth:`enter`.

    Attributes:
        state: of the weight.
        old: the selection so far; ``None`` at first.
        new: the selection from now on.
        weight: the weight.
        share: this process's part of the bank.
        opens: whether the bank is new, so that only zeros can come from it, on any rank.
        entering: places in the new selection whose rows the old one lacks, ordered by the rank that holds them.
        owners: the rank that holds each of these, on the CPU.
    """

    state: State
    old: Projector | None
    new: Projector
    weight: Tensor
    share: Share
    opens: bool
    entering: Tensor
    owners: Tensor

    @classmethod
    def begin(
        cls, state: State, old: Projector | None, new: Projector, weight: Tensor, dtype: torch.dtype, share: Share
    ) -> Swap:
        """Find out what enters the selection; make a bank of this ``dtype`` if there is none.

        Raises:
            RuntimeError: the bank is not this share.
        """
        opens = "bank_steps" not in state
        if opens:
            _open_bank(state, weight, new.dim, dtype, share)
        to_host(state)
        if (found := state["bank_steps"].numel()) != share.rows:
            raise RuntimeError(
                f"The moments bank has {found} rows here, but this rank's share of {share.size} among "
                f"{share.ranks} ranks is {share.rows}: the ranks or shard_bank= have changed"
            )
        entering = torch.ones_like(new.indices, dtype=torch.bool)
        if old is not None:
            entering = ~source_rows(old, new, share.size)[0]
        places = entering.nonzero().flatten()
        owners, order = share.owner(new.indices[places]).sort(stable=True)
        return cls(state, old, new, weight, share, opens, places[order], owners.cpu())

    @property
    def row_bytes(self) -> int:
        """The size of one row in the bank, with its step count."""
        width = self.weight.shape[1 - self.new.dim]
        return 2 * width * int(self.state["bank_exp_avg"].element_size()) + 4

    def leave(self) -> None:
        """Put the moments of rows that leave the selection into this process's share."""
        if self.old is None:
            return
        staying, _ = source_rows(self.new, self.old, self.share.size)
        here = self.share.owner(self.old.indices) == self.share.rank
        places = (here & ~staying).nonzero().flatten()
        moments = held(self.state, self.old, places)
        rows = self._rows_of_share(self.old.indices[places])
        for key, values in zip(BANKED_MOMENTS, moments[:2], strict=True):
            rows.scatter_(self.state[key], _to_host(values))
        self.state["bank_steps"][rows.indices] = moments.steps.cpu()

    def withdraw(self) -> Moments:
        """Read the moments of rows that enter the selection from this process's share; in host memory."""
        here = (self.owners == self.share.rank).to(self.entering.device)
        rows = self._rows_of_share(self.new.indices[self.entering[here]])
        exp_avg, exp_avg_sq = (rows.gather(self.state[key]) for key in BANKED_MOMENTS)
        return Moments(exp_avg, exp_avg_sq, self.state["bank_steps"][rows.indices])

    def enter(self, moments: Moments | None) -> None:
        """Go over to the new selection, given the moments of rows that enter it; ``None`` means zeros."""
        keep(self.state, self.old, self.new, self.weight)
        if moments is not None:
            device = self.weight.device
            put(self.state, self.new, self.entering, Moments(*(_to_device(m, device) for m in moments)))

    def _rows_of_share(self, rows: Tensor) -> Projector:
        return Projector(rows.cpu() - self.share.start, None, self.new.dim)


def _open_bank(state: State, weight: Tensor, dim: int, dtype: torch.dtype, share: Share) -> None:
    pin = has_streams(weight.device)
    rows = weight.narrow(dim, share.start, share.rows)  # for its shape and strides
    for key in BANKED_MOMENTS:
        state[key] = torch.zeros_like(rows, dtype=dtype, device="cpu", pin_memory=pin)
    state["bank_steps"] = torch.zeros(share.rows, dtype=torch.float32, device="cpu", pin_memory=pin)


def _to_host(rows: Tensor) -> Tensor:
    """A copy in host memory, complete on return; pinned for an accelerator, which makes the copy faster."""
    if not has_streams(rows.device):
        return rows.cpu()
    host = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
    current_stream(rows.device).synchronize()
    return host


def _to_device(rows: Tensor, device: torch.device) -> Tensor:
    if has_streams(device) and rows.device.type == "cpu":
        rows = rows.pin_memory()  # else the copy stages it anyway, and slower
    return rows.to(device, non_blocking=True)
