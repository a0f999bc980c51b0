"""``torch.compile`` around a whole training step: forward, backward, ``optimizer.step()``."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import grass
from grass import PAPER, GrassAdamW
from tests.compact_mode.networks import Network, batches, converted, loss_of
from tests.reference import relative_difference

CYCLE = 3
STEPS = 4 * CYCLE + 1
OPTIONS = {"update_interval": CYCLE, "selection": "multinomial_norm", "sketch_size": 4}
Training = tuple[Network, torch.optim.Optimizer]


def dense() -> Training:
    """The defaults of dense mode, with the residual and a bank, and a norm that is plain AdamW."""
    model = Network()
    return model, GrassAdamW(grass.param_groups(model, rank=3, targets="all-linear"), lr=1e-2, **OPTIONS)


def compact() -> Training:
    return converted(**OPTIONS, state_policy="bank")


def paper() -> Training:
    model = Network()
    groups = grass.param_groups(model, rank=3, targets="all-linear")
    return model, GrassAdamW(groups, lr=1e-2, **PAPER | OPTIONS)


def attached() -> Training:
    """Torch's AdamW on active rows. The compiler traces its step, and hooks of Grass run around it."""
    model = Network()
    grass.compact(model, rank=3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=torch.tensor(1e-2))
    grass.attach(optimizer, model, **OPTIONS)
    return model, optimizer


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def torch_log(caplog) -> Iterator[pytest.LogCaptureFixture]:
    """Warnings of the compiler, whose loggers do not propagate."""
    logging.getLogger("torch").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("torch").removeHandler(caplog.handler)


def run(training: Training, backend: object = None) -> None:
    """Train with a scheduler, compiled where a backend is given; a recompilation after two cycles raises."""
    model, optimizer = training
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def whole_step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    step = whole_step if backend is None else torch.compile(whole_step, backend=backend)
    for number, batch in enumerate(batches(STEPS)):
        with torch._dynamo.config.patch(error_on_recompile=number >= 2 * CYCLE):
            step(batch)
        scheduler.step()


@pytest.mark.parametrize(("make", "graphs"), [(dense, 1), (paper, 1), (compact, 2)])
def test_whole_step(make: Callable[[], Training], graphs: int, torch_log) -> None:
    """Same bits as the eager step, no warnings, and no graphs but the model's: one, or one more with a sketch."""
    eager, traced, counter = make(), make(), CompileCounterWithBackend("aot_eager")
    run(eager)
    torch_log.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(traced, counter)
    for (name, ours), theirs in zip(traced[0].named_parameters(), eager[0].parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert counter.frame_count == graphs
    assert not [record.getMessage() for record in torch_log.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_attached_optimizer() -> None:
    """Refreshes do not compile torch's step again: states keep their tensors, and the hooks are not traced."""
    eager, traced, counter = attached(), attached(), CompileCounterWithBackend("aot_eager")
    run(eager)
    run(traced, counter)
    for (name, ours), theirs in zip(traced[0].named_parameters(), eager[0].parameters(), strict=True):
        assert relative_difference(ours, theirs) < 1e-4 or not theirs.any(), name
    assert counter.frame_count <= 4, "two of the model, the first step of AdamW and the later ones"


def test_compiled_model_in_a_closure() -> None:
    """``step(closure)`` still runs a model that was compiled itself as compiled."""
    model, optimizer = dense()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, ran = torch.compile(model, backend=counter), []

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(compiled, batches(1)[0])
        loss.backward()
        ran.append(loss.item())
        return ran[-1]

    assert optimizer.step(closure) == ran[0]
    assert counter.frame_count == 1


def test_hooks_run_once() -> None:
    """Around a step, an eager one and a compiled one."""
    p, calls = torch.nn.Parameter(torch.ones(4, 4)), []
    p.grad, optimizer = torch.ones(4, 4), GrassAdamW([p], rank=2)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in (optimizer.step, torch.compile(optimizer.step, backend="eager")):
        calls.clear()
        step()
        assert calls == ["before", "after"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(("make", "graphs"), [(dense, 1), (compact, 2)])
def test_whole_step_by_inductor(make: Callable[[], Training], graphs: int) -> None:
    eager, compiled, counter = make(), make(), CompileCounterWithBackend("inductor")
    run(eager)
    run(compiled, counter)
    for (name, ours), theirs in zip(compiled[0].named_parameters(), eager[0].parameters(), strict=True):
        # Kernels of the model sum in another order: fp32 rounding, which Adam's normalisation enlarges over 13 steps.
        assert relative_difference(ours, theirs) < 1e-4 or not theirs.any(), name
    assert counter.frame_count == graphs
