"""Work that the next forward need not wait for: a thread and a CUDA stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


class Background:
    """Changes to optimizer state that go on beside the next forward and backward, in the order in which they came.

    The moments bank uses it: an exchange waits for copies between device and host and gathers rows in host memory. The
    thread keeps that off the one that launches kernels, the stream keeps the copies off the one that computes.

    Attributes:
        device_types: where it is used; on other devices, whose memory is the host's, work is done at once.
    """

    def __init__(self) -> None:
        self.device_types = {"cuda"}
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: list[tuple[State, torch.device, Future[torch.cuda.Event | None]]] = []

    def run(self, work: Callable[[], None], state: State, device: torch.device) -> None:
        """Start ``work``, which replaces tensors of ``state``; none may be touched before :meth:`finish`."""
        if device.type not in self.device_types:
            work()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grass")
        before = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._pending.append((state, device, self._thread.submit(self._work, work, device, before)))

    def finish(self) -> None:
        """Wait until all that was started is done, on the device only where the device alone is concerned.

        Raises:
            Exception: the first that work raised.
        """
        pending, self._pending = self._pending, []
        for state, device, future in pending:
            done = future.result()
            if done is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(done)
                for value in state.values():
                    if isinstance(value, Tensor) and value.is_cuda:
                        value.record_stream(current)  # allocated on the other stream, used on this one

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
