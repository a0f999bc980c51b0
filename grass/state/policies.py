r"""What happens to the moments at a refresh: ``reset``, ``keep`` or ``bank``.

======== ================================================================ ==================================
policy   at a refresh                                                     memory beside the ``2rn`` values
======== ================================================================ ==================================
reset    all moments and step counts start again (the paper)              none
keep     a row selected again keeps its moments and its own step count    ``r`` step counts
bank     likewise; the other rows' moments and step counts wait in host   ``r`` step counts; on the host
         memory until they are selected again (:mod:`grass.state.bank`)   ``2mn`` values, ``m`` step counts
======== ================================================================ ==================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grass.options import Options
from grass.selection.projector import Projector
from grass.state.bank import Swap
from grass.state.bank_exchange import BankExchange
from grass.state.moments import keep, reset
from grass.state.precision import full_moments, refresh_key
from grass.state.schema import HOST_KEYS, State


@dataclass(frozen=True)
class Policy(ABC):
    """Moves the moments of one weight from the old selection to the new one.

    Attributes:
        state: of the weight.
        weight: ``(m, n)``.
        options: of its group.
        index: of the parameter among all groups.
        exchange: how to reach the bank.
        by_row: whether each row has a step count of its own also with ``reset``, as those of experts have.
    """

    state: State
    weight: Tensor
    options: Options
    index: int
    exchange: BankExchange
    by_row: bool = False

    @abstractmethod
    def __call__(self, old: Projector | None, new: Projector, resting: Tensor | None = None) -> None:
        """Move the moments; arguments as of :data:`grass.state.refresh.Carry`."""

    def full_moments(self) -> AbstractContextManager[Any]:
        """Moments in full precision within the context."""
        key = refresh_key(self.options, self.index, self.state["step"])
        return full_moments(self.state, self.options.moment_dtype, key)

    def drop_bank(self) -> None:
        """Remove the bank that another policy has left."""
        for key in HOST_KEYS:
            self.state.pop(key, None)


class Reset(Policy):
    """All moments start again, except those of experts without tokens."""

    def __call__(self, old: Projector | None, new: Projector, resting: Tensor | None = None) -> None:
        """Set all moments to zero, except those of ``resting`` rows."""
        self.drop_bank()
        with self.full_moments():
            if self.by_row:
                keep(self.state, None if resting is None else old, new, self.weight, among=resting)
            else:
                reset(self.state, new, self.weight)


class Keep(Policy):
    """Rows selected again keep their moments."""

    def __call__(self, old: Projector | None, new: Projector, resting: Tensor | None = None) -> None:
        """Set the moments of rows that are new in the selection to zero."""
        self.drop_bank()
        with self.full_moments():
            keep(self.state, old, new, self.weight)


class Bank(Policy):
    """The moments of rows that are not selected wait in host memory."""

    def __call__(self, old: Projector | None, new: Projector, resting: Tensor | None = None) -> None:
        """Exchange moments with the bank."""
        share = self.exchange.share(self.weight.shape[new.dim])
        dtype = getattr(torch, self.options.bank_dtype)
        self.exchange.swap(Swap.begin(self.state, old, new, self.weight, dtype, share), self.full_moments())


POLICIES: dict[str, type[Policy]] = {"reset": Reset, "keep": Keep, "bank": Bank}
"""Policies by the name that ``state_policy`` takes."""


def policy_of(
    state: State, weight: Tensor, options: Options, index: int, exchange: BankExchange, *, by_row: bool = False
) -> Policy:
    """The state policy of a group for one of its weights; arguments as in :class:`Policy`."""
    return POLICIES[options.state_policy](state, weight, options, index, exchange, by_row)
