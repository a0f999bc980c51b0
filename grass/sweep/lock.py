"""Locks that live exactly as long as the processes that hold them."""

from __future__ import annotations

import fcntl
from multiprocessing import reduction
from pathlib import Path
from typing import Any, BinaryIO


class Lock:
    """An exclusive lock on a file, from :meth:`take` to :meth:`release`.

    A spawned process that gets it as an argument holds it too: others can take it when both have released it or are
    dead.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @classmethod
    def take(cls, path: Path) -> Lock | None:
        """Lock the file, which is made if it is not there; ``None`` if it is locked already."""
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return cls(file)

    def release(self) -> None:
        """Let go."""
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._file.fileno()),)


def _received(handle: Any) -> Lock:
    return Lock(open(handle.detach(), "ab"))
