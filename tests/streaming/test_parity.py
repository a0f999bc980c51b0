"""A streamed model trains as the resident one does, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import grass
from grass.compact_mode.layer import CompactLayer
from tests.offload.training import same
from tests.streaming.models import MODES, build, train

NORMS: dict[str, Any] = {"selection": "multinomial_norm"}


def assert_same_training(mode: str, options: Any = (), batches: int = 1, **streaming: Any) -> Any:
    resident, by = build(mode, streamed=False, **dict(options))
    streamed, optimizer = build(mode, streamed=True, **dict(options), **streaming)
    expected, losses = train(resident, by, 10, batches=batches), train(streamed, optimizer, 10, batches=batches)
    assert losses == expected
    assert expected[-1] < 0.98 * expected[0]
    assert same(streamed.state_dict(), resident.state_dict())
    assert same(optimizer.state_dict()["state"], by.state_dict()["state"])
    return streamed


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_training(mode: str, offload: Any) -> None:
    assert_same_training(mode, offload=offload)


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize(
    "options", [{"explore": 0}, NORMS, {**NORMS, "state_policy": "bank"}, {"moment_dtype": "8bit"}]
)
def test_training_with_options(options: dict[str, Any], offload: Any) -> None:
    assert_same_training("compact", options, offload=offload)


@pytest.mark.parametrize("mode", ["full", "compact"])
@pytest.mark.parametrize("batches", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("stream", [{}, {"offload_activations": True}, {"cache": 1 << 30}])
def test_accumulation(mode: str, batches: int, stream: dict[str, Any]) -> None:
    assert_same_training(mode, batches=batches, offload="cpu", stream=stream)


def test_autocast() -> None:
    def run(streamed: bool) -> Any:
        model, optimizer = build("compact", streamed=streamed, offload="cpu" if streamed else None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return train(model, optimizer, 6), model.state_dict()

    assert same(run(True), run(False))


def test_evaluation_in_between() -> None:
    def run(streamed: bool) -> list[Any]:
        model, optimizer = build("compact", streamed=streamed, offload="cpu" if streamed else None)
        seen: list[Any] = []
        for step in range(6):
            seen += train(model, optimizer, 1, step)
            model.eval()
            for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                with context():
                    seen.append(model(torch.arange(8).view(1, 8)).sum().item())
            model.train()
        return seen

    assert run(True) == run(False)


@pytest.mark.parametrize("mode", ["compact", "attached"])
def test_gradients_that_the_loop_drops(mode: str) -> None:
    """What was gathered of their norms is dropped with them, by ``model.zero_grad()`` and under any optimizer."""

    def run(*, streamed: bool) -> Any:
        model, optimizer = build("compact", streamed=streamed, update_interval=2, **NORMS)
        if mode == "attached":
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            grass.attach(optimizer, model, update_interval=2, **NORMS)
        losses = []
        for step in range(6):
            (1e3 * model(torch.arange(8).view(1, 8)).square().mean()).backward()
            model.zero_grad()
            losses += train(model, optimizer, 1, step)
        return losses, [module.selected for module in model.modules() if isinstance(module, CompactLayer)]

    assert same(run(streamed=True), run(streamed=False))


@pytest.mark.slow
def test_compiled_units() -> None:
    """Compiled code rounds otherwise, so that eager losses are near, not equal."""

    def run(*, compiled: bool) -> list[float]:
        model, optimizer = build("compact", streamed=compiled, offload="cpu")
        for block in model.blocks:
            block.dropout.p = 0.0  # compiled code draws other numbers
            if compiled:
                block.compile(backend="aot_eager")
        return train(model, optimizer, 5)

    counters.clear()
    assert run(compiled=True) == pytest.approx(run(compiled=False), rel=1e-3)
    assert counters["stats"]["unique_graphs"] > 0


def test_any_optimizer() -> None:
    def run(streamed: bool) -> list[float]:
        model, _ = build("full", streamed=streamed)
        return train(model, torch.optim.AdamW(model.parameters(), fused=True), 5)

    assert run(True) == run(False)


def test_weights_changed_by_hand_are_seen() -> None:
    def run(streamed: bool) -> list[float]:
        model, optimizer = build("compact", streamed=streamed)
        losses = train(model, optimizer, 2)
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
            model.blocks[2].down.active.add_(0.25)
            model.blocks[3].norm.bias.fill_(0.125)
        return losses + train(model, optimizer, 2, 2)

    assert run(True) == run(False)
