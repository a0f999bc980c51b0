"""Half-precision parameters with a float32 master on the host, which is stepped in their place and rounded.

The state keeps the master under ``"master"``. So a checkpoint has it, and a resumed run continues bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grass.offload.home import Home, to_host
from grass.offload.link import Link
from grass.offload.replicas import Replica
from grass.parallel.shards import local
from grass.state.master import current
from grass.state.schema import MOMENTS, State
from grass.stepping.masters import step_master
from grass.stepping.whole import WholeStep


class MasterReplica(Replica):
    """The host's float32 master of a half-precision parameter.

    Attributes:
        host: the master.
    """

    def __init__(self, parameter: Tensor, home: Home, state: State) -> None:
        super().__init__(parameter, home, master_of(parameter, home, state))
        self._values = home.empty_like(local(parameter.detach()))

    def take(self, link: Link) -> None:
        """Copy the gradient down, in half precision."""
        self._fetch(link)

    def step(self, whole: WholeStep, group: dict[str, Any], position: int) -> None:
        """Step the master, and round it."""
        state = whole.states[self.host]
        state.pop("master", None)
        grad = self._home.shard(self._grad, self.device)
        step_master(whole, group, position, self.host, grad, self._values)
        state["master"] = self.host.detach()

    def _outgoing(self) -> Tensor:
        """The rounded values."""
        return self._values


def master_of(parameter: Tensor, home: Home, state: State) -> Tensor:
    """The float32 master of a parameter: that of its state where it still rounds to the parameter's values.

    Moments at full rank that were saved in half precision become float32 too.
    """
    for key in MOMENTS:
        if key in state and "indices" not in state:
            state[key] = state[key].to(torch.float32)
    values = to_host(local(parameter.detach()))
    master, saved = values.float(), state.get("master")
    if saved is not None:
        master = current(local(saved), values)
    return home.shard(home.copy(master), parameter)
