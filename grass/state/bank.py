"""The moments bank: moments and step counts of the rows that are not selected, in host memory.

At a refresh, rows that leave the selection put theirs in, rows that enter it take theirs out. Either every process
holds the bank of a whole weight ``(m, n)``, or each of several holds its share of it: the ranks of data-parallel
training have the same moments of the selected rows, so that a share takes what leaves without communication, and what
enters comes from the rank that holds it (:mod:`grass.state.bank_exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grass.parallel.ranks import Ranks
from grass.selection.projector import Projector
from grass.state.moments import HOST_KEYS, Moments, State, held, keep, put, source_rows


@dataclass(frozen=True)
class Share:
    """The rows ``start <= row < stop`` of ``size``, which one of several ranks holds.

    All ranks hold equally many in order, but for the last ones, as ``torch.chunk`` and ``Shard`` divide a tensor.
    """

    size: int
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, size: int, ranks: Ranks) -> Share:
        """This process's."""
        return cls(size) if ranks.group is None else cls(size, ranks.group.rank(), ranks.group.size())

    @property
    def chunk(self) -> int:
        """Rows of a rank that is not among the last."""
        return -(-self.size // self.ranks)

    @property
    def start(self) -> int:
        """The first row."""
        return min(self.rank * self.chunk, self.size)

    @property
    def rows(self) -> int:
        """How many."""
        return min(self.chunk, self.size - self.start)

    def of_bank(self, bank: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor of the bank, given whole or as that part.

        Raises:
            ValueError: it is neither.
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
    """Bring a bank back: resuming, Lightning moves all of an optimizer's state to the device, after it was loaded."""
    for key in HOST_KEYS & state.keys():
        state[key] = state[key].cpu()


@dataclass
class Swap:
    """A refresh of one weight ``(m, n)`` with its bank: :meth:`leave`, then :meth:`withdraw`, then :meth:`enter`.

    Attributes:
        state: of the weight.
        old: the selection so far; ``None`` at first.
        new: the selection from now on.
        weight: the weight.
        dtype: of the bank, if there is none yet.
        share: this process's part of the bank.
        opens: whether there was no bank, so that nothing but zeros can come from it, on any rank.
        entering: where in the new selection the rows are that the old one has not, ordered by who holds them.
        owners: the rank that holds each of these, on the CPU.
    """

    state: State
    old: Projector | None
    new: Projector
    weight: Tensor
    dtype: torch.dtype
    share: Share
    opens: bool = field(init=False)
    entering: Tensor = field(init=False)
    owners: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.opens = "bank_steps" not in self.state
        to_host(self.state)
        if self.opens:
            self._open()
        elif (found := self.state["bank_steps"].numel()) != self.share.rows:
            raise RuntimeError(
                f"The moments bank has {found} rows here, but this rank's share of {self.share.size} among "
                f"{self.share.ranks} ranks is {self.share.rows}: the ranks or shard_bank= have changed"
            )
        entering = torch.ones_like(self.new.indices, dtype=torch.bool)
        if self.old is not None:
            entering = ~source_rows(self.old, self.new, self.share.size)[0]
        places = entering.nonzero().flatten()
        self.owners, order = self.share.owner(self.new.indices[places]).sort(stable=True)
        self.entering, self.owners = places[order], self.owners.cpu()

    @property
    def row_bytes(self) -> int:
        """What one row takes in the bank, its step count included."""
        width = self.weight.shape[1 - self.new.dim]
        return 2 * width * int(self.state["bank_exp_avg"].element_size()) + 4

    def leave(self) -> None:
        """Put what leaves the selection into this process's share."""
        if self.old is None:
            return
        staying, _ = source_rows(self.new, self.old, self.share.size)
        here = self.share.owner(self.old.indices) == self.share.rank
        places = (here & ~staying).nonzero().flatten()
        moments = held(self.state, self.old, places)
        rows = self._rows_of_share(self.old.indices[places])
        rows.scatter_(self.state["bank_exp_avg"], _to_host(moments.exp_avg))
        rows.scatter_(self.state["bank_exp_avg_sq"], _to_host(moments.exp_avg_sq))
        self.state["bank_steps"][rows.indices] = moments.steps.cpu()

    def withdraw(self) -> Moments:
        """What enters the selection from this process's share, in host memory."""
        here = (self.owners == self.share.rank).to(self.entering.device)
        rows = self._rows_of_share(self.new.indices[self.entering[here]])
        exp_avg, exp_avg_sq = (rows.gather(self.state[key]) for key in ("bank_exp_avg", "bank_exp_avg_sq"))
        return Moments(exp_avg, exp_avg_sq, self.state["bank_steps"][rows.indices])

    def enter(self, moments: Moments | None) -> None:
        """Go over to the new selection, with what enters it from all shares; ``None`` is zeros."""
        keep(self.state, self.old, self.new, self.weight)
        if moments is not None:
            device = self.weight.device
            put(self.state, self.new, self.entering, Moments(*(_to_device(m, device) for m in moments)))

    def _open(self) -> None:
        pin, dim = self.weight.device.type == "cuda", self.new.dim
        rows = self.weight.narrow(dim, self.share.start, self.share.rows)  # for its shape and strides
        for key in ("bank_exp_avg", "bank_exp_avg_sq"):
            self.state[key] = torch.zeros_like(rows, dtype=self.dtype, device="cpu", pin_memory=pin)
        self.state["bank_steps"] = torch.zeros(self.share.rows, dtype=torch.float32, pin_memory=pin)

    def _rows_of_share(self, rows: Tensor) -> Projector:
        return Projector(rows.cpu() - self.share.start, None, self.new.dim)


def _to_host(rows: Tensor) -> Tensor:
    """A copy in host memory, complete on return; pinned under CUDA, where the link is then used in full."""
    if rows.device.type != "cuda":
        return rows.cpu()
    host = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()
    return host


def _to_device(rows: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and rows.device.type == "cpu":
        rows = rows.pin_memory()  # else the copy stages it anyway, and slower
    return rows.to(device, non_blocking=True)
