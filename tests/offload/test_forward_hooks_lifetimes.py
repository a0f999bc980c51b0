"""Which modules have hooks, what these keep alive, and models that are compiled, copied or get another optimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grass import GrassAdamW, Offload
from grass.offload.forward_hooks import _Hook
from tests.experts.models import OUTER, Experts
from tests.experts.models import train as train_experts
from tests.offload.models import DENSE_MODES, EVERY_MODE, SLOW, evaluated, optimizer_for, step, steps
from tests.offload.training import same

Build = Callable[..., nn.Module]


def hooked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_pre_hooks]


def test_which_modules_have_hooks(tiny_llama: Build) -> None:
    model = tiny_llama()
    optimizer = optimizer_for(model, "full", Offload())
    assert hooked(model) == []
    steps(model, optimizer, 3)
    outside = ["", "model", "model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers"]
    blocks = {"model.layers.0": model.model.layers[0], "model.layers.1": model.model.layers[1]}
    owners = [
        f"{block}.{name}"
        for block, module in blocks.items()
        for name, part in module.named_modules()
        if name and next(part.parameters(recurse=False), None) is not None
    ]
    assert sorted(hooked(model)) == sorted([*outside, *blocks, *owners])
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    assert len(hooks) == 0  # the search has ended
    assert optimizer.offload is not None
    hooks = optimizer.offload._hooks
    order = hooks.order(list(model.parameters()))
    last = [p for layer in model.model.layers for p in layer.parameters()]
    assert all(map(torch.equal, order[-len(last) :], last))
    del optimizer, hooks
    gc.collect()
    assert hooked(model) == []


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_nothing_is_kept_alive(mode: str, tiny_llama: Build) -> None:
    model = tiny_llama()
    optimizer = optimizer_for(model, mode, SLOW)
    steps(model, optimizer, 2)
    engine, dropped = weakref.ref(optimizer.offload), weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    assert engine() is None
    twin = copy.deepcopy(model)
    parts = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
    del model
    gc.collect()
    assert all(part() is None for part in parts)
    evaluated(twin)


@pytest.mark.parametrize(
    "scheduled",
    [pytest.param(False, id="freed at once"), pytest.param(True, id="freed by the collector", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_a_dropped_optimizer_ends_its_last_step(mode: str, scheduled: bool, tiny_llama: Build) -> None:
    results = []
    for offload in (None, SLOW):
        model = tiny_llama()
        optimizer = optimizer_for(model, mode, offload)
        if scheduled:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        steps(model, optimizer, 3)
        del optimizer
        gc.collect()
        first = evaluated(model)
        again = GrassAdamW(model if mode == "compact" else model.parameters(), lr=1e-2, offload=offload)
        results.append((first, steps(model, again), dict(model.state_dict())))
    assert same(*results)


def test_a_worker_that_collects_garbage_does_not_wait_for_itself(tiny_llama: Build) -> None:
    model = tiny_llama()
    optimizer = optimizer_for(model, "full", Offload())
    steps(model, optimizer, 2)
    engine = optimizer.offload
    assert engine is not None
    engine.finish()
    before, collecting = evaluated(model), threading.Event()
    box = [optimizer]
    update = engine._executor.submit

    def submit(tasks: Any) -> None:
        work = tasks[1].work

        def drop_and_work() -> None:
            assert collecting.wait(600)
            box.clear()
            gc.collect()
            work()

        tasks[1].work = drop_and_work
        update(tasks)

    engine._executor.submit = submit  # type: ignore[method-assign]
    step(model, optimizer, 3)
    dropped = weakref.ref(optimizer)
    del optimizer
    collecting.set()
    assert evaluated(model) != before
    engine.finish()
    assert dropped() is None


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_copies_have_the_stepped_values_and_wait_for_nothing(
    mode: str, copied: Callable[[Any], Any], tiny_llama: Build
) -> None:
    results = []
    for offload in (None, SLOW):
        model = tiny_llama()
        optimizer = optimizer_for(model, mode, offload)
        steps(model, optimizer, 3)
        twin = copied(model)
        step(model, optimizer, 4)
        hooks = [hook for module in twin.modules() for hook in module._forward_pre_hooks.values()]
        assert all(type(hook) is _Hook and hook._hooks is None for hook in hooks)
        assert all(not getattr(module, "listeners", ()) for module in twin.modules())
        results.append((evaluated(twin), evaluated(model)))
    assert same(*results)


class Scaled(nn.Module):
    """A module with a parameter of its own, around one with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.ones(OUTER, dtype=torch.float64)), Experts()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = self.inside(x, ends) * self.scale
        return y


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("mode", ["full", "compact"])
@pytest.mark.parametrize("part", ["", "inside"])
def test_copies_of_parameters_that_lie_beside_other_modules(
    part: str, mode: str, steps: int, copied: Callable[[Any], Any]
) -> None:
    """They are not copied before their step has ended; that the first forward comes after it makes no difference."""
    twins = []
    for offload in (None, SLOW):
        torch.manual_seed(0)
        model = Scaled()
        optimizer = optimizer_for(model, mode, offload)
        train_experts(model, optimizer, steps)
        twins.append(copied(model.get_submodule(part)))
    assert same(*(twin.state_dict() for twin in twins))


def compile_whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compile_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compile_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def wrap_layers(model: Any) -> Any:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


EAGER_STEPS = [
    ("dense", compile_whole, 0),
    ("compact", compile_whole, 2),
    pytest.param("compact", compile_in_place, 0, marks=pytest.mark.soak),
    ("dense", compile_layers, 2),
    ("compact", wrap_layers, 0),
    pytest.param("dense", wrap_layers, 2, marks=pytest.mark.soak),
]
"""Each way to compile, in one of the modes or both, from the start or after so many steps."""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "compiled", "before"), EAGER_STEPS)
def test_compiled(mode: str, compiled: Callable[[Any], Any], before: int, tiny_llama: Build) -> None:
    results = []
    for offload in (None, SLOW):
        torch.compiler.reset()
        plain = tiny_llama()
        optimizer = optimizer_for(plain, mode, offload)
        losses = steps(plain, optimizer, before)
        model = compiled(plain)
        losses += [value for i in range(3) for value in (step(model, optimizer, i), evaluated(model))]
        step(model, optimizer, 5)
        results.append((losses, evaluated(plain), dict(plain.state_dict())))
    assert same(*results)


@pytest.mark.parametrize("mode", DENSE_MODES)
def test_parameters_that_start_to_train_later(mode: str, tiny_llama: Build) -> None:
    results = []
    for offload in (None, SLOW):
        model: Any = tiny_llama()
        model.lm_head.weight.requires_grad_(False)
        optimizer = GrassAdamW(model.parameters(), lr=1e-2, rank=None if mode == "full" else 4, offload=offload)
        losses = steps(model, optimizer, 3)
        model.lm_head.weight.requires_grad_(True)
        results.append(losses + steps(model, optimizer, 3))
    assert same(*results)
