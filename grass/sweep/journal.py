"""A file of JSON lines that is only appended to, and that survives the death of its writer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Self

Record = dict[str, Any]


class Journal:
    """What happened to one trial. One process writes, any number read.

    Every record is on the disk when :meth:`append` returns. A line that its writer did not finish counts as not
    written: readers wait for its end, and the next writer removes it.

    Attributes:
        losses: the loss at each step that the trial has yielded, in their order.
        events: all other records.
        pace: seconds a step since the trial's process last started; ``None`` before its first step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: dict[int, float] = {}
        self.events: list[Record] = []
        self.pace: float | None = None
        self._began: tuple[int, float] | None = None
        self._read = 0

    def read(self) -> Self:
        """Take in what has been added since the last call."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._take(json.loads(line))
                    self._read += len(line)
        return self

    def _take(self, record: Record) -> None:
        reached, now = next(reversed(self.losses), 0), record.get("time", 0.0)
        if "start" in record:
            self._began = reached, now
        if "step" in record:
            self.losses[record["step"]] = record["loss"]
            if self._began is not None and record["step"] > self._began[0]:
                self.pace = (now - self._began[1]) / (record["step"] - self._began[0])
        else:
            self.events.append(record)

    def append(self, **record: Any) -> None:
        """Write a record and the time.

        Raises:
            OSError: it could not be written, as on a full disk. The records before it are kept.
        """
        self.read()
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(self._read)
            file.seek(self._read)
            file.write(json.dumps({**record, "time": time.time()}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
