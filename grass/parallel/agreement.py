"""What the ranks compare before each step: settings that one of them may have changed.

A rank whose ``update_interval`` differs would enter the collectives of a refresh alone, and one with another learning
rate would train another model. So every rank sends a digest of its settings in each step, also if it has changed
nothing: only then does no rank wait for one that does not know of the change. Only where digests differ do the ranks
send the settings themselves, to name what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grass.parallel.ddp import Joining
from grass.parallel.host_meshes import HostMeshes
from grass.parallel.ranks import Ranks
from grass.private_names import device_types_of

Settings = Mapping[str, Any]
"""Plain values by the names that errors give them."""


class Agreement:
    """Compares settings between the ranks, in host memory: no device waits."""

    def __init__(self) -> None:
        self._meshes = HostMeshes()
        self._is_first = True
        self._joining: Joining | None = None

    def check_joining(self, ranks: Ranks, groups: list[dict[str, Any]]) -> None:
        """Raise ``RuntimeError`` if a module around parameters of these groups is in ``DDP.join()``."""
        if self._joining is None:
            self._joining = Joining([p for group in groups for p in group["params"]] if ranks.group else [])
        self._joining.check()

    def check(self, ranks: Ranks, settings: Settings, at_first: Callable[[], Settings]) -> None:
        """Compare settings; every rank has to call this in each step.

        Args:
            ranks: that train the model together.
            settings: compared each time.
            at_first: makes others, which take longer; compared the first time.

        Raises:
            ValueError: on every rank, naming a setting that differs and the ranks that have each value.
        """
        if ranks.group is None:
            return
        host, compared = self._on_host(ranks), {**settings, **at_first()} if self._is_first else settings
        if host.any_differs(digest(compared)):
            host.verify_settings({**settings, **at_first()})
        self._is_first = False

    def _on_host(self, ranks: Ranks) -> Ranks:
        """The same ranks, with a group that takes tensors in host memory."""
        takes_them = torch.device("cpu") in device_types_of(ranks.group)
        return ranks if takes_them else self._meshes.ranks(ranks)


def digest(settings: Settings) -> int:
    """63 bits that differ for different settings."""
    hashed = hashlib.blake2b(repr(list(settings.items())).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 1
