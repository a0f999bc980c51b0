"""Whichever module is called after a step, it computes with weights that are stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grass import GrassAdamW, Offload
from tests.distributed.world import in_own_process
from tests.offload.training import network, same


class Network(nn.Module):
    """Reads a weight outside the blocks before it comes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.embedding = network(), nn.Embedding(32, 32)
        self.inner = nn.Module()
        self.inner.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.norm(self.embedding(x)) + self.body(x)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


def bare(model: nn.Module) -> nn.Module:
    return model


def of_model(model: Any, x: Tensor) -> Any:
    return model(x)


def of_part(model: Any, x: Tensor) -> Any:
    return model.embedding(x)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, compiled, bare], ids=["DDP", "compile", ""])
@pytest.mark.parametrize("part", [of_model, of_part], ids=["model", "part"])
@in_own_process
def test_the_model_inside_a_wrapper_or_a_part_of_it_waits(
    wrap: Callable[[nn.Module], nn.Module], part: Callable[[Any, Tensor], Tensor]
) -> None:
    results = []
    for offload in (None, Offload(_bytes_per_second=2e5)):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = Network()
        optimizer, wrapped = GrassAdamW(model.parameters(), lr=1e-2, offload=offload), wrap(model)
        for step in range(3):
            x = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            results.append(part(model, x))
    assert same(*results)


def test_a_module_inside_a_block_may_be_called_alone() -> None:
    results = []
    for offload in (None, Offload(_bytes_per_second=2e5)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        whole = nn.Sequential(model)  # the items of the outer list are the blocks
        optimizer = GrassAdamW(model.parameters(), lr=1e-2, offload=offload)
        for _ in range(2):
            whole(torch.arange(8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model[4][0](torch.ones(1, 16)).detach())
    assert torch.equal(*results)


def test_the_items_of_a_model_that_is_a_list_are_blocks() -> None:
    model = network()
    optimizer = GrassAdamW(model.parameters(), lr=1e-2, offload=Offload(_bytes_per_second=2e5))
    seen: list[int] = []
    assert optimizer.offload is not None
    model[1].register_forward_hook(lambda *unused: seen.append(len(optimizer.offload._pending)))
    for _ in range(3):
        model(torch.arange(8).view(1, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[-1] > 0  # the last layers are still on their way when the first one has run
