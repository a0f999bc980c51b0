"""Experts with int8 weights: values, saving, and that they train."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import grass
from grass import GrassAdamW
from grass.compact_mode.weight_codes import decode_weight
from grass.int8 import plain_state_dict
from tests.experts.models import Experts, batch, train
from tests.experts.test_compact import rows_of
from tests.offload.training import same


def converted(dim: int = 1, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Experts()
    grass.compact(model, rank=3, explore=2, dim=dim, weights="int8")
    return model, GrassAdamW(model, **{"lr": 1e-2, "update_interval": 3, **options})


@pytest.mark.parametrize("dim", [0, 1])
def test_values_are_those_of_the_codes(dim: int) -> None:
    torch.manual_seed(0)
    plain, (model, _) = Experts(), converted(dim)
    assert model.up is None
    assert {layer.weight.dtype for layer in rows_of(model)} == {torch.int8}
    state = plain_state_dict(model)
    assert list(state) == ["up", "down"]
    for name, weight in state.items():
        largest = getattr(plain, name).detach().abs().max()
        assert (weight - getattr(plain, name)).abs().max() <= 0.51 * largest / 127
    decoded = Experts()
    for layer, name in zip(rows_of(model), ("up", "down"), strict=True):
        matrix = decode_weight(layer.matrix(), layer.weight_scale, dim, torch.float64)
        getattr(decoded, name).data = layer.as_stored(matrix)
    x, ends = batch(1)
    for given in (x.clone().requires_grad_(), x):
        other = given.detach().clone().requires_grad_(given.requires_grad)
        ours, theirs = model(given, ends), decoded(other, ends)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # scales are float32
        if given.requires_grad:
            ours.square().sum().backward()
            theirs.square().sum().backward()
            torch.testing.assert_close(given.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_trains_and_resumes() -> None:
    model, optimizer = converted()
    losses = train(model, optimizer, 6)
    assert losses[-1] < losses[0]
    other, by = converted()
    missing = other.load_state_dict(model.state_dict())
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    by.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, by, 4, 6) == train(model, optimizer, 4, 6)
    copied = copy.deepcopy(model)
    assert same(copied.state_dict(), model.state_dict())


def test_loads_plain_weights_and_expands() -> None:
    torch.manual_seed(5)
    plain, (model, _) = Experts(), converted()
    model.load_state_dict(plain.state_dict())
    for name, weight in plain_state_dict(model).items():
        largest = getattr(plain, name).detach().abs().max()
        assert (weight - getattr(plain, name)).abs().max() <= 0.51 * largest / 127
    expected = plain_state_dict(model)
    assert grass.expand(model) == ["up", "down"]
    assert same(dict(model.state_dict()), expected)
    assert all(p.requires_grad and p.is_contiguous() for p in model.parameters())
    with pytest.raises(RuntimeError, match="weight_codes"):
        converted()[0].load_state_dict({})


@pytest.mark.parametrize("way", ["offload", "stream", "files"])
def test_offload_and_streaming(way: str, tmp_path: Path) -> None:
    model, optimizer = converted()
    expected = train(model, optimizer, 6)
    other, by = converted(offload="cpu")
    if way != "offload":
        grass.stream(other, device="cpu", units=[""], offload=grass.Offload(path=tmp_path if way == "files" else None))
    assert train(other, by, 6) == expected
    assert same(other.state_dict(), model.state_dict())
