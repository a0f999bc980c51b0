"""Values that change while a copy of them is on its way to the device."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass.machine.link import Link
from grass.offload.executor import Executor
from grass.offload.host_optimizer import HostOptimizer
from grass.offload.tasks import Task
from grass.streaming.device_block import Counts, DeviceBlock
from grass.streaming.host_block import HostBlock
from grass.streaming.prefetch import FORWARD, Prefetcher
from tests.compact_mode.networks import compact_layers
from tests.offload.models import optimizer_for
from tests.offload.training import same
from tests.streaming.models import Network, build, train

LIMIT = 600.0
"""Seconds after which a test hangs."""


def test_a_weight_changed_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied before the change is not used."""
    modules = [nn.Linear(3, 2) for _ in range(4)]
    units = [HostBlock(str(i), module, set()) for i, module in enumerate(modules)]
    weight: Any = units[1].module.weight
    copied, waited = threading.Event(), threading.Event()
    up, wait = Link.up, Executor.wait

    def slow(link: Link, source: Tensor, out: Tensor, after: Any = None) -> None:
        up(link, source, out, after)
        if source.data_ptr() == weight.data_ptr():
            copied.set()
            assert waited.wait(LIMIT)

    def waiting(executor: Executor, task: Task, timeout: float | None = None) -> None:
        if copied.is_set():
            waited.set()
        wait(executor, task, timeout)

    monkeypatch.setattr(Link, "up", slow)
    monkeypatch.setattr(Executor, "wait", waiting)
    prefetcher = Prefetcher(units, Link("cpu"), Executor(("up",)), cache=0)
    prefetcher.use(0, FORWARD, probe=False)  # unit 1 begins to come
    assert copied.wait(LIMIT)
    with torch.no_grad():
        weight.add_(1)
    there = prefetcher.use(1, FORWARD, probe=False)
    assert torch.equal(there[0], weight)


def test_other_weights_for_an_evaluation() -> None:
    """Averages that are put into ``.data`` for an evaluation, and taken out again: no version shows it."""
    torch.manual_seed(0)
    model: Any = Network(4, dropout=0.0)
    grass.stream(model, "cpu", cache=1 << 30)
    ids, weight = torch.arange(8).view(1, 8), model.blocks[1].up.weight

    def evaluated() -> float:
        with torch.no_grad():
            return float(model(ids).sum())

    before, own = model(ids).sum(), weight.detach().clone()
    weight.data.mul_(3)
    assert evaluated() != before.item()
    weight.data.copy_(own)
    assert model(ids).sum().item() == before.item()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["compact", "compact over int8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_changed_by_hand_that_an_evaluation_sees_first(dim: int, mode: str, context: Any) -> None:
    """Writing them into the weight is a change that a unit on the device notices, also without versions."""

    def run(streamed: bool) -> Any:
        model, optimizer = build(mode, streamed=streamed, stream={"cache": 1 << 30}, dim=dim)
        seen = train(model, optimizer, 2)
        with torch.no_grad():
            for layer in compact_layers(model).values():
                layer.active.mul_(0.5)
        for _ in range(2):
            with context():
                seen.append(model(torch.arange(8).view(1, 8)).sum().item())
        return seen + train(model, optimizer, 2, 2), model.state_dict()

    assert same(run(True), run(False))


@pytest.mark.parametrize("offload", [None, grass.Offload()], ids=["resident", "offloaded"])
@pytest.mark.parametrize("mode", ["full", "dense", "compact"])
def test_a_forward_from_before_the_step_is_refused(mode: str, offload: grass.Offload | None) -> None:
    """Its backward computes the forward again, which would be another one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    optimizer = optimizer_for(model, mode, offload)
    grass.stream(model, "cpu")
    first, second = (model(torch.randn(4, 8)).square().mean() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="have changed between forward and backward"):
        second.backward()


def test_closed_between_forward_and_backward(tiny_llama: Any) -> None:
    """Checkpoints of transformers would compute a unit's forward again."""
    model = tiny_llama()
    model.activation_checkpointing_enable()
    stream = grass.stream(model, "cpu")
    ids = torch.arange(16).view(1, 16)
    loss = model(input_ids=ids, labels=ids).loss
    stream.close()
    with pytest.raises(RuntimeError, match="closed between"):
        loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.slow
def test_a_step_that_begins_while_a_copy_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits for it: its version has counted the step, whose update runs later in another thread."""
    model, optimizer = build("compact", streamed=True, offload="cpu", stream={"cache": 1 << 20})
    train(model, optimizer, 1)
    ids = torch.randint(32, (4, 8))
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    (unit, *_), begun = model.handle.units, threading.Event()
    update, version = HostOptimizer._update, HostBlock.version

    def late(*arguments: Any) -> None:
        time.sleep(0.2)
        update(*arguments)

    def stepped(self: HostBlock) -> Any:
        if not begun.is_set():
            begun.set()
            optimizer.step()
        return version(self)

    monkeypatch.setattr(HostOptimizer, "_update", late)
    monkeypatch.setattr(HostBlock, "version", stepped)
    block = DeviceBlock(unit, model.handle._prefetcher._link)
    block.begin(Counts())
    assert block.task.work is not None
    block.task.work()
    optimizer.offload.finish()
    assert begun.is_set()
    assert block.version is not None
    assert block.version.steps == unit.version().steps
    for place, there in zip(unit.places, block.tensors, strict=True):
        assert torch.equal(place.get(), there)
