"""Work that runs during the next forward, in a thread and a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from grass.device import current_stream, has_streams, new_stream, on, record_event


class Background:
    """Runs changes to optimizer state during the next forward and backward, in the order in which they were started.

    The moments bank uses it: an exchange waits for copies between device and host, and gathers rows in host memory. In
    a thread of its own it does not delay kernel launches; in a stream of its own its copies do not delay computation.

    Attributes:
        in_thread: whether work for a device without streams runs in the thread too, and not at once.
    """

    def __init__(self) -> None:
        self.in_thread = False
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pending: list[tuple[dict[str, Any], torch.device, object, Future[torch.Event | None]]] = []

    def run(self, work: Callable[[], None], state: dict[str, Any], device: torch.device) -> None:
        """Start ``work``, which replaces tensors of ``state``; do not touch these before :meth:`finish`."""
        if not (has_streams(device) or self.in_thread):
            work()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grass")
        before = record_event(current_stream(device)) if has_streams(device) else None
        # Memory that the current stream allocated is reused by it as soon as nothing refers to it. The other stream may
        # still have to read it, so it is kept until the current stream has waited.
        kept = work, list(state.values())
        self._pending.append((state, device, kept, self._thread.submit(self._work, work, device, before)))

    def finish(self) -> None:
        """Wait until all started work is done. Work of the stream is only ordered before the current stream.

        Raises:
            Exception: the first one that work raised.
        """
        while self._pending:
            state, device, _, future = self._pending[0]
            try:
                done = future.result()
            except Exception:
                self._pending.clear()
                raise
            if done is not None:
                current = current_stream(device)
                current.wait_event(done)
                for value in state.values():
                    if isinstance(value, Tensor) and value.device == device:
                        value.record_stream(current)  # allocated on the other stream, used on this one
            self._pending.pop(0)

    def _work(self, work: Callable[[], None], device: torch.device, before: torch.Event | None) -> torch.Event | None:
        with torch.no_grad(), self._stream(device) if before else nullcontext():
            if before is None:
                work()
                return None
            current_stream(device).wait_event(before)
            work()
            return record_event(current_stream(device))

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        return on(self._streams[device])
