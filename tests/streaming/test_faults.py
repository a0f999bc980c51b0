"""A copy that fails or hangs is an error in the training loop, never a wait without end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass.machine.link import Link
from grass.offload.executor import Executor
from grass.offload.host_copies import InPlace
from tests.offload.test_faults import LIMIT, fail, in_time
from tests.streaming.models import Block, Network, build, train

SEEN = ("up:", "down:", "waiting")
"""What the state of the queues names."""


def failing_at(number: int, copy: Callable[..., None]) -> Callable[..., None]:
    left = itertools.count(number, -1)

    def copied(*args: Any) -> None:
        if next(left) == 0:
            fail()
        copy(*args)

    return copied


def hold_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies to the host go on only while the loop waits for something."""
    waiting = threading.Event()
    down, wait = Link.down, Executor.wait

    def copied(*args: Any) -> None:
        assert waiting.wait(LIMIT)
        down(*args)

    def waited(*args: Any) -> None:
        waiting.set()
        try:
            wait(*args)
        finally:
            waiting.clear()

    monkeypatch.setattr(Link, "down", copied)
    monkeypatch.setattr(Executor, "wait", waited)


def trained(**stream: Any) -> tuple[Any, Any]:
    model, optimizer = build("compact", streamed=True, offload="cpu", stream=stream)
    train(model, optimizer, 2)
    optimizer.offload.finish()
    return model, optimizer


@pytest.mark.parametrize("offload_activations", [False, True])
@pytest.mark.parametrize("number", [0, 7, 30])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_copy_that_fails(
    direction: str, number: int, offload_activations: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(offload_activations=offload_activations)
    monkeypatch.setattr(Link, direction, failing_at(number, getattr(Link, direction)))
    for _ in range(2):  # the error stays
        error = in_time(lambda: train(model, optimizer, 3))
        assert isinstance(error, RuntimeError)
        assert isinstance(error.__cause__, ArithmeticError)
        for part in ("on purpose", *SEEN):
            assert part in str(error)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_copy_that_hangs(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    executor: Any = model.handle._prefetcher._executor
    executor.deadline = executor._state.deadline = 0.05  # from now on: what comes does not end
    free = threading.Event()
    monkeypatch.setattr(Link, direction, lambda *unused: free.wait(LIMIT))
    error = in_time(lambda: train(model, optimizer, 3))
    free.set()
    assert isinstance(error, RuntimeError)
    for part in ("runs for more than 0.05 s", *SEEN):
        assert part in str(error)


def test_a_step_that_fails_is_raised_by_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    monkeypatch.setattr(InPlace, "step", fail)
    error = in_time(lambda: train(model, optimizer, 2))
    assert isinstance(error, RuntimeError)
    assert "on purpose" in str(error)


def test_a_fault_leaves_the_hosts_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close the stream, and the model is what it was."""
    model, _ = trained()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    monkeypatch.setattr(Link, "up", fail)
    assert isinstance(in_time(lambda: model(torch.zeros(1, 1, dtype=torch.long))), RuntimeError)
    model.handle.close()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()


class Moody(nn.Module):
    """A block that fails when it is told to, before or after it has computed."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block, self.fails = block, ""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        if self.fails == "forward" or (self.fails == "backward" and torch._C._current_graph_task_id() != -1):
            fail()
        y: Tensor = self.block(x, shift=shift)
        if self.fails == "gradient" and y.requires_grad:
            y.register_hook(fail)
        return y


@pytest.mark.parametrize("moment", ["forward", "backward", "gradient"])
@pytest.mark.parametrize("offload_activations", [False, True])
def test_the_loop_goes_on_after_an_error_of_its_own(
    moment: str, offload_activations: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a device that had no memory: gradients that were on their way do not come later."""
    hold_gradients(monkeypatch)

    def run(*, streamed: bool) -> list[float]:
        torch.manual_seed(0)
        model = Network(checkpointed=not streamed)
        model.blocks = nn.ModuleList(Moody(block) for block in model.blocks)  # type: ignore[arg-type]
        if streamed:
            grass.stream(model, device="cpu", offload_activations=offload_activations)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, 2)
        broken: Any = model.blocks[1]
        broken.fails = moment
        with pytest.raises(ArithmeticError, match="on purpose"):
            train(model, optimizer, 1)
        broken.fails = ""
        optimizer.zero_grad()
        return losses + train(model, optimizer, 3, 2)

    assert run(streamed=True) == run(streamed=False)
