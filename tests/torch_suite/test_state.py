"""State: its shapes, copies, hooks, and what ``load_state_dict`` takes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grass import GrassAdamW
from tests.reference import assert_same_state
from tests.torch_suite.cases import (
    HARMLESS,
    Build,
    assert_equal,
    both,
    harmless,
    parameters,
    take_steps,
    values,
)

ADDED_SINCE = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Group keys that state dicts of older releases of torch or of this package may lack."""


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Saved, and loaded with nothing but tensors and plain values allowed."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def twins(build: Build, **options: Any) -> tuple[GrassAdamW, list[nn.Parameter], GrassAdamW, list[nn.Parameter]]:
    """An optimizer after five steps, and a fresh one of parameters with the same values."""
    held = parameters()
    optimizer = build(held, **options)
    take_steps(optimizer, held, range(5))
    others = [nn.Parameter(p.detach().clone()) for p in held]
    return optimizer, held, build(others, **options), others


@both
@harmless
def test_a_loaded_optimizer_goes_on_alike(build: Build, options: dict[str, Any]) -> None:
    optimizer, held, other, others = twins(build, **options)
    saved = optimizer.state_dict()
    other.load_state_dict(through_a_file(saved))
    take_steps(optimizer, held, range(5, 12))
    take_steps(other, others, range(5, 12))
    assert_equal(others, held)


@both
def test_loading_leaves_the_state_dict_alone(build: Build) -> None:
    optimizer, _, other, _ = twins(build)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other.load_state_dict(saved)
    assert_same_state(saved, kept)


@both
def test_a_step_count_that_is_a_number(build: Build) -> None:
    """As old releases of torch saved it; also without the group keys that came later."""
    optimizer, held, other, others = twins(build)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = float(state["step"])
    for group in saved["param_groups"]:
        for key in ADDED_SINCE:
            del group[key]
    other.load_state_dict(saved)
    take_steps(optimizer, held, range(5, 12))
    take_steps(other, others, range(5, 12))
    assert_equal(others, held)
    vector = other.state[others[2]]["step"]
    assert isinstance(vector, Tensor)
    assert vector.dtype == torch.float32


def test_state_of_torch() -> None:
    """Without a rank the state of ``torch.optim.AdamW`` is taken over, but not that of ``amsgrad``."""
    held, control = parameters(), parameters()
    theirs = torch.optim.AdamW(control, lr=0.01)
    take_steps(theirs, control, range(3))
    with torch.no_grad():
        for p, value in zip(held, values(control), strict=True):
            p.copy_(value)
    ours = GrassAdamW(held)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    take_steps(ours, held, range(3, 8))
    take_steps(theirs, control, range(3, 8))
    for a, b in zip(held, control, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="Invalid amsgrad=True"):
        ours.load_state_dict(torch.optim.AdamW(control, amsgrad=True).state_dict())


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda item: pickle.loads(pickle.dumps(item)),
}


@both
@pytest.mark.parametrize("options", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
def test_copies(build: Build, options: dict[str, Any], through: Callable[[Any], Any]) -> None:
    for steps in (0, 4):
        held = parameters()
        optimizer = build(held, **options)
        take_steps(optimizer, held, range(steps))
        others, other = through((held, optimizer))
        take_steps(optimizer, held, range(4, 9))
        take_steps(other, others, range(4, 9))
        assert_equal(others, held)
        assert_same_state(other.state_dict(), optimizer.state_dict())


@both
def test_copies_have_the_same_public_attributes(build: Build) -> None:
    optimizer = twins(build)[0]
    optimizer.note = "mine"
    for name, other in (("deepcopy", copy.deepcopy(optimizer)), ("loaded", twins(build)[2])):
        public = {key for key in vars(optimizer) if not key.startswith("_")} - {"note"}
        assert public <= set(vars(other)), name


@both
def test_groups_added_later(build: Build) -> None:
    """They take the defaults that they do not name, in the first step as in all later ones."""
    early, late = parameters(), parameters()
    first = build([{"params": early[:2], "lr": 0.01}, {"params": early[2:]}], lr=0.001)
    second = build([{"params": late[:2], "lr": 0.01}], lr=0.001)
    second.add_param_group({"params": late[2:]})
    take_steps(first, early, range(5))
    take_steps(second, late, range(5))
    assert_equal(late, early)
    assert second.param_groups[1]["lr"] == 0.001
    one = build([late[0]])
    one.add_param_group({"params": late[1]})
    assert one.param_groups[1]["params"] == [late[1]]


@both
def test_step_hooks(build: Build) -> None:
    held, calls = parameters(), []
    optimizer = build(held)
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("before", o is optimizer))),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("after", o is optimizer))),
    ]
    take_steps(optimizer, held, [1, 2])
    assert calls == [("before", True), ("after", True)] * 2
    for handle in handles:
        handle.remove()
    take_steps(optimizer, held, [3])
    assert len(calls) == 4


@both
def test_hooks_of_all_optimizers(build: Build) -> None:
    """The process's hooks run outside of the optimizer's own."""
    held, calls = parameters(), []
    optimizer = build(held)
    optimizer.register_step_pre_hook(lambda *_: calls.append("own before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("own after"))
    everywhere = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("all before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all after")),
    ]
    try:
        take_steps(optimizer, held, [1])
    finally:
        for handle in everywhere:
            handle.remove()
    assert set(calls[:2]) == {"all before", "own before"}
    assert set(calls[2:]) == {"all after", "own after"}


@both
def test_state_dict_hooks(build: Build) -> None:
    """Before and after, in the order of registration or in front; what a hook returns replaces the state dict."""
    calls: list[str] = []
    optimizer, _, other, _ = twins(build)
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre, first"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "note": "mine"})
    saved = optimizer.state_dict()
    assert calls == ["pre, first", "pre"]
    assert saved["note"] == "mine"

    def without_the_note(o: torch.optim.Optimizer, loading: dict[str, Any]) -> dict[str, Any]:
        calls.append("loading")
        return {key: value for key, value in loading.items() if key != "note"}

    other.register_load_state_dict_pre_hook(without_the_note)
    other.register_load_state_dict_post_hook(lambda o: calls.append(f"loaded {len(o.state)}"))
    other.load_state_dict(saved)
    assert calls[2:] == ["loading", "loaded 5"]
    assert_same_state(other.state_dict(), {key: saved[key] for key in ("state", "param_groups")})


@both
def test_named_parameters(build: Build) -> None:
    held, unnamed = parameters(), parameters()
    names = [f"layer.{i}" for i in range(len(held))]
    optimizer, control = build(list(zip(names, held, strict=True))), build(unnamed)
    take_steps(optimizer, held, range(5))
    take_steps(control, unnamed, range(5))
    assert_equal(held, unnamed)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
    assert "param_names" not in control.state_dict()["param_groups"][0]
    control.load_state_dict(optimizer.state_dict())  # names are no part of what has to agree
    assert optimizer.param_groups[0]["param_names"] == names


@both
def test_state_dict_is_keyed_by_position(build: Build) -> None:
    optimizer, held, _, _ = twins(build)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["params"] == list(range(len(held)))
    assert set(saved["state"]) == set(range(len(held)))
    assert saved["state"][2]["exp_avg"].shape == held[2].shape
