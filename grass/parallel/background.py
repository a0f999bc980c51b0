"""Work that runs during the next forward, in a thread and a CUDA stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class Background:
    """Runs changes to optimizer state during the next forward and backward, in the order in which they were started.

    The moments bank uses it: an exchange waits for copies between device and host, and gathers rows in host memory. In
    a thread of its own it does not delay kernel launches; in a stream of its own its copies do not delay computation.

    Attributes:
        device_types: devices for which work runs in the thread; for others it is done at once.
    """

    def __init__(self) -> None:
        self.device_types = {"cuda"}
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: list[tuple[dict[str, Any], torch.device, Future[torch.cuda.Event | None]]] = []

    def run(self, work: Callable[[], None], state: dict[str, Any], device: torch.device) -> None:
        """Start ``work``, which replaces tensors of ``state``; do not touch these before :meth:`finish`."""
        if device.type not in self.device_types:
            work()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grass")
        before = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._pending.append((state, device, self._thread.submit(self._work, work, device, before)))

    def finish(self) -> None:
        """Wait until all started work is done. Work of the CUDA stream is only ordered before the current stream.

        Raises:
            Exception: the first one that work raised.
        """
        while self._pending:
            state, device, future = self._pending[0]
            try:
                done = future.result()
            except Exception:
                self._pending.clear()
                raise
            if done is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(done)
                for value in state.values():
                    if isinstance(value, Tensor) and value.is_cuda:
                        value.record_stream(current)  # allocated on the other stream, used on this one
            self._pending.pop(0)

    def _work(
        self, work: Callable[[], None], device: torch.device, before: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        with torch.no_grad(), self._stream(device) if before else nullcontext():
            if before is None:
                work()
                return None
            torch.cuda.current_stream(device).wait_event(before)
            work()
            done: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
            return done

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams[device])
