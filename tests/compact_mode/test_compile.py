"""``torch.compile``: one graph, compiled no more once every kind of step has been seen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from grass import GrassAdamW
from tests.compact_mode.networks import DIMS, Network, batches, compact_layers, converted, loss_of, selections, train
from tests.reference import relative_difference

CYCLE = 3


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_training(backend: object, model: Network, optimizer: GrassAdamW, data: list) -> None:
    """Train through a compiled model; after the first two cycles a recompilation raises."""
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for step, batch in enumerate(data):
        with torch._dynamo.config.patch(error_on_recompile=step >= 2 * CYCLE):
            optimizer.zero_grad()
            loss_of(compiled, batch).backward()
            optimizer.step()


def check(backend: str, dim: int, **options: object) -> None:
    options = dict(dim=dim, update_interval=CYCLE, selection="multinomial_norm", **options)
    data = batches(4 * CYCLE + 1)
    eager, eager_optimizer = converted(**options)
    train(eager, eager_optimizer, data)
    model, optimizer = converted(**options)
    first, counter = selections(model), CompileCounterWithBackend(backend)
    compiled_training(counter, model, optimizer, data)
    assert selections(model) == selections(eager) != first
    expected = eager.state_dict()
    for name, value in model.state_dict().items():
        # Kernels fuse and sum in another order: fp32 rounding, which Adam's normalisation enlarges over 13 steps.
        assert relative_difference(value, expected[name]) < 1e-4 or not expected[name].any(), name
    for name, layer in compact_layers(model).items():
        assert torch.equal(layer.active, layer.weight.index_select(dim, layer.selected)), name
    assert counter.frame_count == 2, "one graph with the sketch, one without"
    assert not counters["graph_break"]


@pytest.mark.parametrize("refresh", ["sketch", "exact"])
@pytest.mark.parametrize("dim", DIMS)
def test_traced_training(dim: int, refresh: str) -> None:
    """Everything of ``torch.compile`` but the code generation."""
    check("aot_eager", dim, refresh=refresh, sketch_size=4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("dim", DIMS)
def test_compiled_training(dim: int) -> None:
    check("inductor", dim, state_policy="bank", sketch_size=4)


def test_autocast_and_evaluation() -> None:
    """A compiled model evaluates under ``no_grad`` and trains under autocast as the eager one does."""
    model, _ = converted()
    compiled, batch = torch.compile(model, fullgraph=True, backend="aot_eager"), batches(1)[0]
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch[0]), model(batch[0]))
    grads = []
    for run in (compiled, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(run, batch)
        loss.backward()
        grads.append(model.up.active.grad.clone())
        model.zero_grad()
    assert relative_difference(*grads) < torch.finfo(torch.bfloat16).eps


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("active", [None, torch.float32], ids=["bf16", "fp32 over bf16"])
def test_fused_step(active: torch.dtype | None) -> None:
    """``fused=True`` compiles the optimizer's update; the weights agree with the plain step's."""
    states = []
    for fused in (False, True):
        model, optimizer = converted(torch.bfloat16, active=active, state_policy="keep", fused=fused)
        train(model, optimizer, batches(9, dtype=torch.bfloat16))
        states.append(model.state_dict())
    for name, value in states[0].items():
        # Some roundings to bf16 fall to the other side: biases and norms take torch's unfused AdamW with fused=False,
        # which rounds between its operations.
        assert relative_difference(states[1][name], value) < 2**-6 or not value.any(), name


@pytest.mark.parametrize("compiled", [True, False])
def test_a_change_that_no_forward_has_seen_is_told(compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """SAM perturbs active rows before its second forward: a compiled one does not see it, and the step says so once."""
    model, optimizer = converted(update_interval=2)
    run = torch.compile(model, backend="eager") if compiled else model
    for batch in batches(3):
        loss = loss_of(run, batch)
        loss.backward()
        with torch.no_grad():
            for layer in compact_layers(model).values():
                layer.active.add_(0.1)
            perturbed = loss_of(run, batch)
            for layer in compact_layers(model).values():
                layer.active.sub_(0.1)
        assert torch.equal(perturbed, loss.detach()) == compiled
        optimizer.step()
        optimizer.zero_grad()
    told = [message for message in caplog.messages if "Compiled forwards do not look" in message]
    assert len(told) == compiled * len(compact_layers(model)), "once for each layer"


def test_nothing_is_told_of_a_run_without_changes_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = converted(update_interval=2)
    compiled_training("eager", model, optimizer, batches(6))
    assert "Compiled forwards" not in caplog.text
