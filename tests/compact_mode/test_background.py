"""The bank's exchange beside the next forward: here on a CPU's thread, as it runs on a CUDA device's stream."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from grass import GrassAdamW
from grass.state.bank import Swap
from tests.compact_mode.networks import DIMS, assert_same_weights, batches, converted, loss_of, train

OPTIONS = dict(explore=0, state_policy="bank", selection="multinomial_norm", update_interval=2)


def beside(**options: object) -> tuple[nn.Module, GrassAdamW]:
    """A network whose optimizer exchanges moments in a thread."""
    model, optimizer = converted(**{**OPTIONS, **options})
    optimizer._background.in_thread = True
    return model, optimizer


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Exchanges after the first selection wait until this is set, and so does nothing else."""
    opened = threading.Event()

    leave = Swap.leave

    def guarded(swap: Swap) -> None:
        if swap.old is not None:
            assert opened.wait(1200), "an exchange was awaited while the gate was shut"
        leave(swap)

    monkeypatch.setattr(Swap, "leave", guarded)
    return opened


@pytest.fixture
def opens_when_awaited(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate opens when somebody waits for an exchange."""
    result = Future.result

    def awaited(future: Any, timeout: float | None = None) -> Any:
        gate.set()
        return result(future, timeout)

    monkeypatch.setattr(Future, "result", awaited)


@pytest.mark.usefixtures("opens_when_awaited")
def test_forward_and_backward_do_not_wait(gate: threading.Event) -> None:
    model, optimizer = beside()
    train(model, optimizer, batches(2))  # ends in a refresh
    loss_of(model, batches(1)[0]).backward()
    assert [not future.done() for *_, future in optimizer._background._pending] == [True] * 3
    assert not gate.is_set()
    optimizer.step()
    assert not optimizer._background._pending


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bank_dtype", ["float32", "bfloat16"])
def test_equals_exchange_at_once(dim: int, bank_dtype: str) -> None:
    (ours, optimizer), (theirs, other) = (
        make(dim=dim, bank_dtype=bank_dtype) for make in (beside, lambda **o: converted(**{**OPTIONS, **o}))
    )
    assert train(ours, optimizer, batches(9)) == train(theirs, other, batches(9))
    assert_same_weights(ours, theirs)


def state_dict(optimizer: GrassAdamW) -> dict:
    return copy.deepcopy(optimizer.state_dict()["state"])  # as it is now


def deep_copy(optimizer: GrassAdamW) -> dict:
    return state_dict(copy.deepcopy(optimizer))


@pytest.mark.usefixtures("opens_when_awaited")
@pytest.mark.parametrize("read", [state_dict, deep_copy])
def test_readers_wait(read: Callable[[GrassAdamW], dict]) -> None:
    model, optimizer = beside()
    train(model, optimizer, batches(2))
    ours = read(optimizer)
    reference_model, reference = converted(**OPTIONS)
    train(reference_model, reference, batches(2))
    theirs = state_dict(reference)
    for position, state in theirs.items():
        for key, value in state.items():
            torch.testing.assert_close(ours[position][key], value, rtol=0, atol=0)


@pytest.mark.usefixtures("opens_when_awaited")
def test_load_waits() -> None:
    """An exchange in flight does not overwrite what is loaded."""
    model, optimizer = beside()
    train(model, optimizer, batches(1))
    before = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, batches(1))
    optimizer.load_state_dict(before)
    for position, state in before["state"].items():
        assert torch.equal(optimizer.state_dict()["state"][position]["exp_avg"], state["exp_avg"])


def test_errors_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the thread is raised by the next step, not lost."""
    model, optimizer = beside()
    train(model, optimizer, batches(1))
    monkeypatch.setattr("grass.state.bank.Swap.withdraw", lambda *_: 1 / 0)
    train(model, optimizer, batches(1))
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, batches(1))


def test_dense_mode_exchanges_at_once() -> None:
    """It uses the new rows' moments in the same step."""
    weight = nn.Parameter(torch.randn(8, 6))
    optimizer = GrassAdamW([weight], rank=2, dim=0, **OPTIONS)
    optimizer._background.in_thread = True
    for _ in range(5):
        weight.grad = torch.randn(8, 6)
        optimizer.step()
        assert not optimizer._background._pending
