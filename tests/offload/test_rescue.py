"""After a fault, what is saved has of each parameter the values before the step or after it; loading ends the fault."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from grass import GrassAdamW, Offload
from grass.offload.device_step import DeviceStep
from grass.offload.host_copies import HostCopy, LayerCopy
from tests.offload.test_faults import fail, in_time, late, step, trained, zero_too_early
from tests.offload.training import MODES, Mode, build, same, train

OFFLOADS = {"host": {}, "host and device": {"fraction": 0.5}}
Saved = dict[str, Any]


def saved(model: nn.Module, optimizer: GrassAdamW) -> list[Saved]:
    """Of each parameter its values and its state."""
    names = {p: name for name, p in model.named_parameters()}
    values, states = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()["state"]))
    parts = []
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        name = names[p].replace("active", "weight")
        own = {key: value for key, value in values.items() if key.startswith(name)}
        parts.append({**own, "state": states[i]})
    return parts


def before_and_after(mode: Mode) -> list[list[Saved]]:
    """What the resident optimizer has before the step that fails and after it."""
    model, optimizer = build(mode)
    train(model, optimizer, 2)
    found = [saved(model, optimizer)]
    step(model, optimizer)
    return [*found, saved(model, optimizer)]


def failing_once(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets the n-th call of some functions fail before it has changed anything."""
    calls = itertools.count(1)

    def failing(work: Callable[..., None]) -> Callable[..., None]:
        def once(*args: Any) -> None:
            if next(calls) == number:
                fail()
            work(*args)

        return once

    return failing


def go_on(model: nn.Module, optimizer: GrassAdamW) -> list[float]:
    optimizer.zero_grad()
    return train(model, optimizer, 3, 2)


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("stage", ["take", "give"])
@pytest.mark.parametrize("place", OFFLOADS)
@pytest.mark.parametrize("mode", MODES)
def test_what_a_fault_leaves(
    mode: Mode, place: str, stage: str, number: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = before_and_after(mode)
    model, optimizer = trained(mode, **OFFLOADS[place])
    failing = failing_once(number)
    for kind in (HostCopy, LayerCopy):
        monkeypatch.setattr(kind, stage, failing(getattr(kind, stage)))
    monkeypatch.setattr(DeviceStep, "down", failing(DeviceStep.down))
    step(model, optimizer)
    model.state_dict() if first == "model" else optimizer.state_dict()
    for now, before, after in zip(saved(model, optimizer), *references, strict=True):
        assert same(now, before) or same(now, after)
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.step()
    model(torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.parametrize("mode", MODES)
def test_an_update_that_fails_has_destroyed_its_state_only(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer), (expected, _) = trained(mode), before_and_after(mode)
    with monkeypatch.context() as patch:
        patch.setattr("grass.stepping.optimizer_step.step_group", fail)
        step(model, optimizer)
        for _ in range(2):
            values = model.state_dict()
            with pytest.raises(RuntimeError, match=r"destroyed optimizer state, of .*: load a checkpoint"):
                optimizer.state_dict()
    for part in expected:
        assert all(torch.equal(values[key], value) for key, value in part.items() if key != "state")


@pytest.mark.parametrize("mode", MODES)
def test_values_that_cannot_come_back(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(mode)
    for kind in (HostCopy, LayerCopy):
        monkeypatch.setattr(kind, "give", fail)
    step(model, optimizer)
    for read in (model.state_dict, optimizer.state_dict) * 2:
        with pytest.raises(RuntimeError, match=r"destroyed values, of .*: load a checkpoint"):
            read()


@pytest.mark.parametrize("what", ["take", "give", "update"])
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_ends_the_fault(mode: Mode, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(mode)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with monkeypatch.context() as patch:
        if what == "update":
            patch.setattr("grass.stepping.optimizer_step.step_group", fail)
        for kind in (HostCopy, LayerCopy):
            patch.setattr(kind, what, fail, raising=False)
        step(model, optimizer)
        assert isinstance(in_time(lambda: optimizer.offload.finish()), RuntimeError)  # type: ignore[union-attr]
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    twin, resident = build(mode)
    train(twin, resident, 2)
    assert go_on(model, optimizer) == go_on(twin, resident)


@pytest.mark.parametrize("mode", MODES)
def test_after_gradients_were_zeroed_in_place(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    references = before_and_after(mode)
    model, optimizer = trained(mode)
    zero_too_early(model, optimizer, monkeypatch)
    for now, before, after in zip(saved(model, optimizer), *references, strict=True):
        assert same(now, before) or same(now, after)


@pytest.mark.parametrize("moment", ["before the values come", "when they have come"])
@pytest.mark.parametrize("mode", MODES)
def test_after_parameters_were_changed_in_place(mode: Mode, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is consistent; of the change what the step has not overwritten."""
    references = before_and_after(mode)
    model, optimizer = trained(mode)
    changed = threading.Event()
    if moment.startswith("before"):
        for kind in (HostCopy, LayerCopy):
            monkeypatch.setattr(kind, "give", late(kind.give, changed))
    step(model, optimizer)
    if moment.startswith("when"):
        optimizer.offload._executor.drain()  # type: ignore[union-attr]
    with torch.no_grad():
        for p in filter(torch.is_floating_point, model.parameters()):
            p.clamp_(-0.01, 0.01)
    changed.set()
    error = in_time(lambda: model(torch.zeros(1, 1, dtype=torch.long)))
    assert isinstance(error, RuntimeError)
    assert "was changed while its step was on its way" in str(error)
    for now, before, after in zip(saved(model, optimizer), *references, strict=True):
        for part in (now, before, after):
            part["state"].pop("active", None)  # values, which were changed
        assert same(now["state"], before["state"]) or same(now["state"], after["state"])
    with pytest.raises(RuntimeError, match="was changed while its step was on its way"):
        optimizer.step()


@pytest.mark.parametrize("how", ["zero_", "mul_"])
@pytest.mark.parametrize("place", OFFLOADS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_changed_through_data(mode: Mode, place: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No version shows it, so the values do."""
    model, optimizer = trained(mode, **OFFLOADS[place])
    changed = threading.Event()
    for kind in (HostCopy, LayerCopy):
        monkeypatch.setattr(kind, "take", late(kind.take, changed))
    monkeypatch.setattr(DeviceStep, "up", late(DeviceStep.up, changed))
    step(model, optimizer)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_() if how == "zero_" else p.grad.data.mul_(2)
    changed.set()
    error = in_time(lambda: optimizer.offload.finish())  # type: ignore[union-attr]
    assert isinstance(error, RuntimeError)
    assert "changed in place before the step had read it" in str(error)


@pytest.mark.parametrize("grad", [torch.zeros(3, 200), torch.full((3, 200), float("nan")), torch.ones(200, 3).t()])
@pytest.mark.parametrize("offload", [Offload(), Offload(fraction=1.0)])
def test_gradients_that_nobody_changes_are_as_they_were(grad: torch.Tensor, offload: Offload) -> None:
    p = nn.Parameter(torch.ones(3, 200))
    optimizer = GrassAdamW([p], offload=offload)
    for each in (grad, torch.ones(()).expand(3, 200)):
        p.grad = each
        optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2
