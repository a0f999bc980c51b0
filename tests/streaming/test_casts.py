"""Casts and moves after ``grass.stream``, also while copies are on their way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import grass
from tests.offload.training import same
from tests.streaming.models import Network, build, train

IDS = torch.arange(16).view(2, 8)
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to dtype": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to cpu": lambda model: model.to("cpu"),
    "cpu": lambda model: model.cpu(),
    "to both": lambda model: model.to("cpu", torch.float64),
}


def used(model: nn.Module) -> Any:
    """What a forward and a backward give."""
    model.zero_grad()
    logits = model(IDS)
    logits.float().square().mean().backward()
    return logits.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("cache", [0, 1 << 20])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts(cast: Callable[[nn.Module], nn.Module], cache: int) -> None:
    torch.manual_seed(0)
    resident, streamed = Network(dropout=0.0), Network(dropout=0.0)
    streamed.load_state_dict(resident.state_dict())
    grass.stream(streamed, device="cpu", cache=cache)
    for change in (cast, CASTS["float"]):
        for model in (resident, streamed):
            assert change(model) is model
        assert same(used(streamed), used(resident))
        assert same(streamed.state_dict(), resident.state_dict())
    assert isinstance(streamed.blocks[0], type(resident.blocks[0]))


def test_bytes_after_a_cast() -> None:
    model = Network()
    handle = grass.stream(model, device="cpu")
    model.double()
    model(IDS)
    assert handle.counts.bytes == handle.counts.loads * handle.units[0].nbytes
    assert handle.units[0].nbytes == 8 * sum(p.numel() for p in model.blocks[0].parameters())


def test_a_cast_while_units_come() -> None:
    """The units that come for the next forward were begun in the old precision."""
    model = Network(6)
    handle = grass.stream(model, device="cpu", offload=grass.Offload(_bytes_per_second=3e6))
    resident = copy.deepcopy(model)
    with torch.no_grad():
        for cast in ("double", "float", "bfloat16", "float"):
            for each in (model, resident):
                each.eval()
                each(IDS)
                each(IDS)
                CASTS[cast](each)
            assert torch.equal(model(IDS), resident(IDS))
    assert handle.counts.loads > 0


@pytest.mark.parametrize("mode", ["full", "compact"])
def test_units_are_cast_when_their_step_has_ended(mode: str) -> None:
    """It has not when ``optimizer.step`` returns. To a wider type and back changes nothing."""

    def run(streamed: bool) -> Any:
        model, optimizer = build(mode, streamed=streamed, offload="cpu" if streamed else None)
        losses = train(model, optimizer, 3)
        model.blocks.double().float()
        return losses + train(model, optimizer, 3, 3)

    assert run(True) == run(False)
