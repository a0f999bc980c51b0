"""Saved, loaded, copied and pickled: a streamed model is one like any other, also while a step is on its way."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW
from grass.offload.executor import Executor
from grass.offload.host_copies import InPlace
from grass.offload.host_optimizer import HostOptimizer
from grass.offload.tasks import Task
from tests.offload.training import same
from tests.streaming.architectures import network, train
from tests.streaming.models import build as build_small
from tests.streaming.models import train as train_small

IDS = torch.arange(3, 11).view(1, 8)


LIMIT = 600.0
"""Seconds after which a test hangs."""


def step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host step streamed parameters only when somebody begins to wait."""
    asked = threading.Event()
    queue, step, wait = HostOptimizer.step, InPlace.step, Executor.wait

    def queued(engine: HostOptimizer, *args: Any) -> None:
        asked.clear()
        queue(engine, *args)

    def stepped(parameter: InPlace, *args: Any) -> None:
        assert asked.wait(LIMIT)
        step(parameter, *args)

    def waited(executor: Executor, task: Task, timeout: float | None = None) -> None:
        asked.set()
        wait(executor, task, timeout)

    monkeypatch.setattr(HostOptimizer, "step", queued)
    monkeypatch.setattr(InPlace, "step", stepped)
    monkeypatch.setattr(Executor, "wait", waited)


def running() -> tuple[Any, GrassAdamW]:
    """A streamed model, right after a step."""
    model = network("llama")
    grass.compact(model, rank=4)
    optimizer = GrassAdamW(model, lr=1e-2, offload="cpu", update_interval=3)
    model.handle = grass.stream(model, device="cpu")
    train(model, optimizer, 3)
    return model, optimizer


def resident() -> Any:
    """The model that :func:`running` returns, when its step has ended."""
    model = network("llama")
    grass.compact(model, rank=4)
    train(model, GrassAdamW(model, lr=1e-2, update_interval=3), 3)
    return model


def pickled(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    step_late(monkeypatch)


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": pickled}


def no_streamed_class(model: nn.Module) -> bool:
    return not any("Streamed" in type(part).__name__ or hasattr(part, "_block_forward") for part in model.modules())


@pytest.mark.parametrize("finished", [False, True])
def test_save_pretrained(finished: bool, tmp_path: Path) -> None:
    model, optimizer = running()
    if finished:
        assert optimizer.offload is not None
        optimizer.offload.finish()
    model.save_pretrained(tmp_path)
    opened, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    expected = resident()
    with torch.no_grad():
        logits = [each.eval()(IDS).logits for each in (opened, model, expected)]
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[2])
    assert opened.config.architectures == ["LlamaForCausalLM"]


def test_state_dict_while_a_step_is_on_its_way() -> None:
    model, _ = running()
    state = model.state_dict()
    assert same(state, resident().state_dict())
    assert all(value.device.type == "cpu" for value in state.values())


def test_load_state_dict() -> None:
    """The values loaded are those used, also by units that were on the device."""
    model, _ = running()
    before = {key: value.clone() for key, value in network("llama").state_dict().items()}
    with torch.no_grad():
        trained = model.eval()(IDS).logits
        model.load_state_dict(before)
        loaded = model(IDS).logits
        assert torch.equal(loaded, network("llama").eval()(IDS).logits)
    assert not torch.equal(loaded, trained)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_ordinary(copied: Callable[[Any], Any]) -> None:
    """Of the values after the step; what the copy does is not counted, and the model trains on."""
    model, optimizer = running()
    twin = copied(model)
    expected = resident()
    assert same(twin.state_dict(), expected.state_dict())
    assert [type(part) for part in twin.modules()] == [type(part) for part in expected.modules()]
    assert no_streamed_class(twin)
    assert twin.handle is None
    ours = train(model, optimizer, 2, 3)
    losses = train(twin, GrassAdamW(twin, lr=1e-2), 2, 3)
    assert losses[0] == ours[0]
    assert len(grass.stream(twin, device="cpu").units) == 4


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_units_that_are_converted_layers(copied: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    grass.compact(model, rank=2)
    optimizer = GrassAdamW(model, lr=1e-2, offload="cpu")
    handle = grass.stream(model, device="cpu")
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = copied(model)
    assert no_streamed_class(twin)
    assert torch.equal(twin(torch.ones(2, 8)), model(torch.ones(2, 8)))
    assert len(handle.units) == 4


@pytest.mark.parametrize("mode", ["full", "dense", "compact", "compact over int8"])
@pytest.mark.parametrize("later", ["streamed", "resident"])
def test_resume(mode: str, later: str) -> None:
    """From the state of a streamed run, streamed or not; the step had not ended when it was saved."""
    model, optimizer = build_small(mode, streamed=True, offload="cpu")
    train_small(model, optimizer, 4)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    expected = train_small(model, optimizer, 4, 4)
    other, by = build_small(mode, streamed=later == "streamed", offload="cpu" if later == "streamed" else None)
    train_small(other, by, 1)  # what is on the device is of no use afterwards
    other.load_state_dict(saved[0])
    by.load_state_dict(saved[1])
    assert train_small(other, by, 4, 4) == expected
    assert same(other.state_dict(), model.state_dict())


def test_close_leaves_an_ordinary_model() -> None:
    model, optimizer = build_small("compact", streamed=True, offload="cpu")
    twin, by = build_small("compact", streamed=False)
    first = train_small(model, optimizer, 3)
    model.handle.close()
    loads = model.handle.counts.loads
    assert no_streamed_class(model)
    assert first + train_small(model, optimizer, 3, 3) == train_small(twin, by, 6)
    assert model.handle.counts.loads == loads
    assert same(model.state_dict(), twin.state_dict())
    model.handle = grass.stream(model, device="cpu")
    assert train_small(model, optimizer, 3, 6) == train_small(twin, by, 3, 6)
