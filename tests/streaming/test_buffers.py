"""Buffers that a forward on the device changes arrive on the host, once per forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

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


@pytest.mark.parametrize("options", [{}, {"cache": 1 << 20}, {"offload_activations": True}])
@pytest.mark.parametrize("kind", ["own", "spectral_norm"])
def test_backward_computes_with_the_buffers_of_the_forward(kind: str, options: dict) -> None:
    """A forward that computes with a buffer that it has changed runs again from the buffer as it was."""

    def unit() -> nn.Module:
        if kind == "own":
            return Centered()
        return nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    resident, streamed, _ = pair(lambda: Chain([unit() for _ in range(4)]), **options)
    assert train(streamed, 3, 2) == train(resident, 3, 2)
    assert same(streamed.state_dict(), resident.state_dict())
    x = torch.ones(4, WIDTH)
    for model in (resident, streamed):  # the graph is gone through twice
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(streamed.parameters(), resident.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
