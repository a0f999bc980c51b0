"""Which backward passes a sketch is gathered from: those whose gradients the step uses, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW


def trained(between: str, size: float, selection: str) -> dict[str, Tensor]:
    """A model after twelve steps, each followed by a backward pass of another loss, whose gradients are not used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    grass.compact(model, rank=0.25)
    optimizer = GrassAdamW(model, update_interval=3, selection=selection)
    for _ in range(12):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if between == "frozen":
            model.requires_grad_(False)
        (size * model(torch.randn(8, 16, requires_grad=True)).square().mean()).backward()
        if between == "frozen":
            for name, p in model.named_parameters():
                p.requires_grad_(not name.endswith("weight"))
        else:
            model.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("selection", ["top_r", "multinomial_norm", "uniform"])
@pytest.mark.parametrize("between", ["frozen", "dropped"])
def test_gradients_that_no_step_uses_choose_no_rows(between: str, selection: str) -> None:
    small, large = (trained(between, size, selection) for size in (1.0, 1e3))
    assert all(torch.equal(small[name], large[name]) for name in small)


def test_a_batch_that_is_dropped_for_its_values_leaves_the_refresh_alone() -> None:
    """As loops do that skip a loss that is not finite, by the model's ``zero_grad``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    grass.compact(model, rank=0.25)
    optimizer = GrassAdamW(model, update_interval=4, selection="top_r")
    for step in range(4):
        if step == 3:
            (model(torch.randn(8, 16)) * float("nan")).mean().backward()
            model.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [optimizer.state[layer.active]["refreshes"] for layer in (model[0], model[2])] == [2, 2]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_compiled_code_drops_what_the_loop_drops(accumulate: int) -> None:
    """And keeps what micro-batches gather."""
    chosen = []
    for compiled, dropped in [(False, False), (True, False), (True, True)]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        grass.compact(model, rank=0.25)
        optimizer = GrassAdamW(model, update_interval=3, selection="top_r")
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        data = torch.randn(9, accumulate, 8, 16, generator=torch.Generator().manual_seed(1))
        for batches in data:
            if dropped:
                (1e3 * forward(batches[0].flip(1)).square().mean()).backward()
                model.zero_grad()
            for batch in batches:
                forward(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        chosen.append([layer.selected.tolist() for layer in (model[0], model[2])])
    assert chosen[0] == chosen[1] == chosen[2]
