"""Models built on the ``meta`` device: whoever gives the weights their values, training starts from there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import Network, batches, compact_layers, loss_of, plain_copy, train

BATCH = batches(1, dtype=torch.float64)[0]


def built_on_meta(**options: Any) -> Network:
    """A converted network whose tensors hold garbage that would show: 1e30."""
    with torch.device("meta"):
        model = Network(torch.float64)
    grass.compact(model, rank=3, explore=2, **options)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(1e30)
    return model


def initialise(model: nn.Module, way: str) -> None:
    """Give the plain parameters the values of ``Network(seed=1)``, in the ways that loops by hand do."""
    source = dict(Network(torch.float64, seed=1).named_parameters())
    for name, p in model.named_parameters():
        if name not in source:
            continue
        if way == "data":
            p.data.copy_(source[name])
        elif way == "load_state_dict":
            continue
        else:
            with torch.no_grad():
                p.copy_(source[name])
    if way == "load_state_dict":
        model.load_state_dict(source, strict=False)


@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("way", ["no_grad", "data", "load_state_dict"])
@pytest.mark.parametrize("dim", [0, 1])
def test_initialised_by_hand(dim: int, way: str, optimizer_first: bool) -> None:
    model = built_on_meta(dim=dim)
    optimizer = GrassAdamW(model, lr=1e-2) if optimizer_first else None
    initialise(model, way)
    plain = Network(torch.float64, seed=1)
    torch.testing.assert_close(model(BATCH[0]), plain(BATCH[0]))
    losses = train(model, optimizer or GrassAdamW(model, lr=1e-2), [BATCH] * 12)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(plain_copy(model)(BATCH[0]), model(BATCH[0]))


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_changed_through_data(dim: int, caplog: pytest.LogCaptureFixture) -> None:
    """New values of a weight are taken up whole, not mixed with the columns that were active."""
    model = Network(torch.float64)
    grass.compact(model, rank=3, explore=2, dim=dim)
    loss_of(model, BATCH)
    fresh = copy.deepcopy(Network(torch.float64, seed=5).state_dict())
    for name, layer in compact_layers(model).items():
        layer.weight.data.copy_(fresh[f"{name}.weight"])
    loss_of(model, BATCH)
    assert "its active rows follow" in caplog.text
    for name, layer in compact_layers(model).items():
        torch.testing.assert_close(layer.weight, fresh[f"{name}.weight"])
        assert layer.holds_active()
