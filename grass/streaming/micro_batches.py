"""Micro-batches that pass through a streamed model together: all of them through one unit before the next unit comes.

Each micro-batch has a thread of its own, with its forward and backward. One thread runs at a time. It passes its turn
on when it comes to a unit, in forward and in backward. So a unit that was loaded serves all of them. Gradients add up
in the order of the micro-batches, as they do when these come one after another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from grass.device import current_stream, has_streams, on
from grass.private_names import tree_flatten

Loss = Callable[[Any], Tensor]


class MicroBatches:
    """Whose turn it is. Without micro-batches on their way, :meth:`pass_on` does nothing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[threading.Thread] = []
        self._fault: BaseException | None = None

    def run(self, batches: Sequence[Any], loss_of: Loss, device: torch.device) -> list[Tensor]:
        """Run forward and backward of all micro-batches; returns their losses, detached.

        Raises:
            BaseException: what the first micro-batch that failed has raised, or an interrupt. The others stop at their
                next unit, and have ended when this raises.
        """
        if any(thread.is_alive() for thread in self._waiting):
            raise RuntimeError("loss_fn must not call stream.step itself")
        losses: list[Tensor] = [torch.empty(0, device="cpu")] * len(batches)
        as_here = _surroundings(device)

        def work(number: int) -> None:
            try:
                with as_here():
                    self._wait()
                    loss = loss_of(batches[number])
                    _check_loss(loss)
                    losses[number] = loss.detach()
                    loss.backward()  # type: ignore[no-untyped-call]
            except BaseException as error:
                self._fail(error)
            finally:
                self._leave()

        self._fault = None
        self._waiting = [
            threading.Thread(target=work, args=(i,), name=f"grass-micro-batch-{i}", daemon=True)
            for i in range(len(batches))
        ]
        threads = list(self._waiting)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt
            self._fail(error)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if self._fault is not None:
            raise self._fault
        return losses

    def pass_on(self) -> None:
        """Let the next micro-batch run, and wait for the next turn."""
        if threading.current_thread() not in self._waiting:
            return
        with self._changed:
            self._waiting.append(self._waiting.pop(0))
            self._changed.notify_all()
        self._wait()

    def at_backward(self, outputs: Any) -> Any:
        """A unit's outputs, whose backward begins with :meth:`pass_on`."""
        if threading.current_thread() in self._waiting:
            leaves, _ = tree_flatten(outputs)
            first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad), None)
            if first is not None:
                first.register_hook(lambda grad: self.pass_on())  # type: ignore[no-untyped-call]
        return outputs

    def _wait(self) -> None:
        me = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None or self._waiting[0] is me)
            if self._fault is not None:
                raise RuntimeError("Another micro-batch has failed")

    def _leave(self) -> None:
        with self._changed:
            if (me := threading.current_thread()) in self._waiting:
                self._waiting.remove(me)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._fault is None:
                self._fault = error
            self._changed.notify_all()


def _check_loss(loss: Any) -> None:
    """Raise an error for what backward cannot begin with."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"loss_fn must return a scalar, got a tensor of shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError("loss_fn must return a loss with a gradient: it is detached, or nothing that it reads trains")


def _surroundings(device: torch.device) -> Callable[[], ExitStack]:
    """What a thread takes over from the one that starts it: autocast, the device's stream, one thread for backward."""
    kinds = {device.type, "cpu"}
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    stream = current_stream(device) if has_streams(device) else None

    def again() -> ExitStack:
        stack = ExitStack()
        if stream is not None:
            stack.enter_context(on(stream))
        for kind, (enabled, dtype) in autocast.items():
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
        # backward of a GPU's nodes runs in this thread, which may wait, and not in one that all share
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        return stack

    return again
