"""Buffers that a forward on the device changes arrive on the host, once per forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.offload.training import same
from tests.streaming.chains import WIDTH, Chain, pair, train


class Normed(nn.Module):
    """Batch norm, whose forward changes buffers; and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("cache", [0, 1 << 20])
@pytest.mark.parametrize("batches", [1, 3])
def test_buffers_change_once_per_forward(batches: int, cache: int) -> None:
    resident, streamed, _ = pair(lambda: Chain([Normed() for _ in range(4)]), cache=cache)
    assert train(streamed, 3, batches) == train(resident, 3, batches)
    assert same(streamed.state_dict(), resident.state_dict())
    assert streamed.get_buffer("units.2.norm.num_batches_tracked") == 3 * batches
    for model in (resident, streamed):
        model.eval()
    x = torch.ones(2, WIDTH)
    assert torch.equal(streamed(x), resident(x))
    with torch.no_grad():
        for model in (resident, streamed):
            model.train()(x)
    assert same(streamed.state_dict(), resident.state_dict())
    assert train(streamed, 1, first=3) == train(resident, 1, first=3)


def test_buffers_that_do_not_change_stay() -> None:
    """A unit is not copied again for them."""
    _, streamed, handle = pair(lambda: Chain([Normed() for _ in range(4)]), cache=1 << 20)
    streamed.eval()
    for _ in range(3):
        streamed(torch.ones(2, WIDTH)).sum().backward()
    assert handle.counts.loads == 4


class Centered(nn.Module):
    """Computes with a buffer that its forward has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.linear((x - self.mean.clone()).square()).tanh()


def test_units_that_change_buffers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Backward runs their forward again from the changed buffers. Batch norm does not compute with its own."""
    resident, streamed, _ = pair(lambda: Chain([Centered() for _ in range(4)]))
    assert train(streamed, 2, 1) != train(resident, 2, 1)
    told = [message for message in caplog.messages if "forwards of Centered change buffers" in message]
    assert len(told) == 1, "once for four units"
    caplog.clear()
    _, streamed, _ = pair(
        lambda: Chain([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in "1234"])
    )
    train(streamed, 2, 1)
    assert "change buffers" not in caplog.text
