"""Stopping a run politely."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class GracefulStop:
    """While entered, the first SIGTERM or SIGINT sets ``requested``; a second one has its previous effect."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> GracefulStop:
        self._previous = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
