"""What goes wrong beside the training loop is an error at the next wait; what cannot work is refused at once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW, Offload
from grass.offload.host_copies import HostCopy, LayerCopy
from tests.offload.training import MODES, Mode, build, train

LIMIT = 600.0
"""Seconds after which a test hangs."""
Wait = Callable[[nn.Module, GrassAdamW], object]
WAITS: dict[str, Wait] = {
    "forward": lambda model, optimizer: model(torch.zeros(1, 1, dtype=torch.long)),
    "step": lambda model, optimizer: optimizer.step(),
    "finish": lambda model, optimizer: optimizer.offload.finish(),  # type: ignore[union-attr]
}


def in_time(work: Callable[[], object]) -> BaseException | None:
    """The error that work raises in a thread of its own; fails if it hangs."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), "it hangs"
    return errors[0] if errors else None


def fail(*unused: Any, **also_unused: Any) -> None:
    raise ArithmeticError("on purpose")


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained(mode: Mode, **options: Any) -> tuple[nn.Sequential, GrassAdamW]:
    """After two steps that went well."""
    model, optimizer = build(mode, offload=Offload(**options))
    train(model, optimizer, 2)
    assert optimizer.offload is not None
    optimizer.offload.finish()
    return model, optimizer


def step(model: nn.Module, optimizer: GrassAdamW) -> None:
    model(torch.arange(8).view(1, 8)).float().square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("stage", ["take", "update", "give"])
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_is_raised_by_the_next_wait(mode: Mode, stage: str, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(mode)
    before = values(model)
    if stage == "update":
        monkeypatch.setattr("grass.stepping.optimizer_step.step_group", fail)
    else:
        for kind in (HostCopy, LayerCopy):
            monkeypatch.setattr(kind, stage, fail)
    step(model, optimizer)
    for _ in range(2):  # the error stays
        error = in_time(lambda: WAITS[wait](model, optimizer))
        assert isinstance(error, RuntimeError)
        assert isinstance(error.__cause__, ArithmeticError)
        for part in ("on purpose", "down:", "host:", "up:", "waiting"):
            assert part in str(error)
    assert all(map(torch.equal, values(model), before))


@pytest.mark.parametrize("mode", MODES)
def test_weights_behind_the_fault_stay_as_they_were(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(mode)
    before = values(model)
    step(model, optimizer)
    assert optimizer.offload is not None
    optimizer.offload.finish()
    order = [task.name for task in optimizer.offload.last_tasks if task.resource == "up"]
    optimizer.zero_grad()
    after = values(model)
    gives = {kind: kind.give for kind in (HostCopy, LayerCopy)}
    given: list[HostCopy] = []

    def second_fails(self: HostCopy, link: Any) -> None:
        given.append(self)
        if len(given) == 2:
            fail()
        gives[type(self)](self, link)

    for kind in gives:
        monkeypatch.setattr(kind, "give", second_fails)
    step(model, optimizer)
    assert isinstance(in_time(optimizer.offload.finish), RuntimeError)
    assert len(given) == 2 < len(order)
    changed = [not torch.equal(a, b) for a, b in zip(values(model), after, strict=True)]
    assert sum(changed) <= 1
    assert not all(map(torch.equal, after, before))


@pytest.mark.parametrize("stage", ["take", "give"])
def test_a_stuck_copy_is_an_error(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained("full")
    executor: Any = optimizer.offload._executor
    executor.deadline = executor._state.deadline = 0.05  # from now on: what comes does not end
    stuck = threading.Event()
    monkeypatch.setattr(HostCopy, stage, lambda self, link: stuck.wait(LIMIT))
    step(model, optimizer)
    error = in_time(lambda: model(torch.zeros(1, 1, dtype=torch.long)))
    stuck.set()
    assert isinstance(error, RuntimeError)
    assert "runs for more than 0.05 s" in str(error)


def zero_too_early(model: nn.Module, optimizer: GrassAdamW, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Zero gradients in place before the host has taken them: the next forward raises, and this is its error."""
    zeroed = threading.Event()
    for kind in (HostCopy, LayerCopy):
        monkeypatch.setattr(kind, "take", late(kind.take, zeroed))
    step(model, optimizer)
    model.zero_grad(set_to_none=False)
    zeroed.set()
    error = in_time(lambda: model(torch.zeros(1, 1, dtype=torch.long)))
    assert isinstance(error, RuntimeError)
    return error


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_changed_before_it_was_copied(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(mode)
    error = zero_too_early(model, optimizer, monkeypatch)
    assert "changed in place before the step had read it" in str(error)
    assert "zero_grad(set_to_none=True)" in str(error)


def late(take: Callable[..., None], event: threading.Event) -> Callable[..., None]:
    def wait_and_take(self: HostCopy, link: Any) -> None:
        assert event.wait(LIMIT)
        take(self, link)

    return wait_and_take


@pytest.mark.parametrize("mode", MODES)
def test_zeroing_in_place_through_the_optimizer_waits(mode: Mode) -> None:
    model, optimizer = build(mode, offload=Offload(_bytes_per_second=1e6))
    twin, resident = build(mode)
    for _ in range(3):
        for each, its in ((model, optimizer), (twin, resident)):
            step(each, its)
            its.zero_grad(set_to_none=False)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


@pytest.mark.parametrize("mode", MODES)
def test_weights_changed_between_a_step_and_its_values(mode: Mode) -> None:
    model, optimizer = trained(mode, _bytes_per_second=2e4)
    step(model, optimizer)
    with torch.no_grad():
        for p in filter(torch.is_floating_point, model.parameters()):
            p.clamp_(-0.01, 0.01)
    error = in_time(lambda: model(torch.zeros(1, 1, dtype=torch.long)))
    assert isinstance(error, RuntimeError)
    assert "was changed while its step was on its way: call optimizer.offload.finish() before" in str(error)


def test_what_has_failed_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained("compact")
    monkeypatch.setattr("grass.stepping.optimizer_step.step_group", fail)
    step(model, optimizer)
    assert isinstance(in_time(optimizer.step), RuntimeError)
    engine = weakref.ref(optimizer.offload)
    del model, optimizer
    gc.collect()
    assert engine() is None


def test_step_in_backward_is_refused() -> None:
    with pytest.raises(ValueError, match="build it without offload="):
        grass.step_in_backward(build("dense", offload=Offload())[1])


@pytest.mark.parametrize(
    ("value", "error"), [("cuda", ValueError), ("", ValueError), (1, TypeError), (True, TypeError), ({}, TypeError)]
)
def test_other_values_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"Invalid offload={value!r}: must be 'cpu', a grass.Offload, or None"):
        GrassAdamW(nn.Linear(2, 2).parameters(), offload=value)


@pytest.mark.parametrize("named", [True, False])
def test_a_fault_names_the_parameter(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that the optimizer was given, or by number and shape."""
    layer = nn.Linear(3, 2)
    optimizer = GrassAdamW(layer.named_parameters() if named else layer.parameters(), offload="cpu")
    monkeypatch.setattr("grass.stepping.optimizer_step.step_group", fail)
    layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'weight update'" if named else r"'parameter 0 of shape \(2, 3\) update'"):
        optimizer.step()


def test_the_printed_time_says_what_it_is_of() -> None:
    _, optimizer = trained("dense")
    assert "copies and updates of a step, without forward and backward: predicted" in repr(optimizer.offload)
