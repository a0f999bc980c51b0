"""Layers that read one input draw the same columns and save them once."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import grass
from grass.compact_mode import siblings
from tests.compact.networks import plain_copy, through_file

NAMES = ("q", "k", "v")


class Attention(nn.Module):
    """Three projections of one input, which may be changed in place or copied between them, and one of another."""

    def __init__(self, between: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(12, 8) for _ in NAMES)
        self.out = nn.Linear(8, 12)
        self.after = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        self.between, self.used = between, {"k": True}

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        y = self.q(x)
        if self.between == "changed":
            x.mul_(2.0)
        if self.between == "copied":
            x = x.clone()
        if self.between == "doubled":
            x = x * 2.0
        y = y + self.v(x) * (self.k(x) if self.used["k"] else 1.0)
        return self.after(self.out(y))


def converted(between: str = "", **options) -> tuple[Attention, grass.GrassAdamW]:
    model = Attention(between)
    grass.compact(model, rank=3, targets="all-linear", **options)
    return model, grass.GrassAdamW(model, lr=1e-2, update_interval=3)


def layers(model: nn.Module) -> list:
    return [model.get_submodule(name) for name in NAMES]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    for batch in torch.randn(steps, 5, 12, generator=torch.Generator().manual_seed(seed)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def gathered(model: nn.Module, batch: Tensor) -> int:
    """How many different tensors of six columns a forward saves of the projections' inputs."""
    found: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.shape == (5, 6) and saved.is_floating_point():
            found[saved.data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(batch)
    return len(found)


def columns(model: nn.Module) -> dict[str, list[int]]:
    return {name: m.chosen.tolist() for name, m in model.named_modules() if hasattr(m, "chosen")}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_siblings_draw_alike_and_others_do_not(steps: int) -> None:
    model, optimizer = converted()
    train(model, optimizer, steps)
    drawn = columns(model)
    assert drawn["q"] == drawn["k"] == drawn["v"]
    assert drawn["after.0"] != drawn["after.1"]
    assert gathered(model, torch.randn(5, 12)) == 1 + 3  # of q, k and v; of each other layer


@pytest.mark.parametrize("between", ["", "changed", "copied"])
def test_gradients_are_those_of_the_plain_layers(between: str) -> None:
    """Also where the input is another tensor, or the same one with other values."""
    model, optimizer = converted(between)
    train(model, optimizer, 4)
    plain, batch = plain_copy(model), torch.randn(5, 12)
    plain.between = between.replace("changed", "doubled")  # plain layers save the input, which must not change
    for m in (model, plain):
        m(batch).square().mean().backward()
    for name in ("q", "k", "v", "out", "after.0"):
        layer, weight = model.get_submodule(name), plain.get_submodule(name).weight
        expected = weight.grad[:, layer.chosen].clone()
        expected[:, layer.rank :] *= layer.gradient_scale
        torch.testing.assert_close(layer.active.grad, expected, rtol=1e-5, atol=1e-6)  # float32
    assert gathered(model, batch) == 4 + {"": 0, "changed": 1, "copied": 1}[between]


def test_a_sibling_that_rests_draws_by_itself() -> None:
    model, optimizer = converted()
    train(model, optimizer, 2)
    model.used["k"] = False
    train(model, optimizer, 1)
    model.used["k"] = True
    drawn = columns(model)
    assert drawn["q"] == drawn["v"] != drawn["k"]
    assert gathered(model, torch.randn(5, 12)) == 5
    plain, batch = plain_copy(model), torch.randn(5, 12)
    for m in (model, plain):
        m(batch).square().mean().backward()
    expected = plain.k.weight.grad[:, model.k.selected]
    torch.testing.assert_close(model.k.active.grad[:, :3], expected, rtol=1e-5, atol=1e-6)  # float32


def test_columns_that_were_changed_by_hand_are_not_shared() -> None:
    model, _ = converted()
    indices = torch.tensor([i for i in range(12) if i not in model.k.chosen][:3])
    model.k.explore(indices)
    assert gathered(model, torch.randn(5, 12)) == 5
    model.k.explore(model.q.explored.clone())
    model.q.explore(model.q.explored.clone())
    model.v.explore(model.q.explored.clone())
    assert gathered(model, torch.randn(5, 12)) == 4


def test_autocast_shares_the_cast_columns() -> None:
    model, _ = converted()
    with torch.autocast("cpu", torch.bfloat16):
        assert gathered(model, torch.randn(5, 12)) == 4


def test_copies_and_resumed_models_share() -> None:
    model, optimizer = converted()
    train(model, optimizer, 4)
    again, resumed = converted()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    for one in (copy.deepcopy(model), again):
        assert gathered(one, torch.randn(5, 12)) == 4
    assert columns(again) == columns(model)
    train(model, optimizer, 4, seed=2)
    train(again, resumed, 4, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert gathered(again, torch.randn(5, 12)) == 4


def test_nothing_is_kept_alive() -> None:
    model, _ = converted()
    x = torch.randn(5, 12)
    reference = weakref.ref(x)
    y = model.q(x)
    last = siblings._LAST.gathered
    del x
    gc.collect()
    assert reference() is None
    assert last.columns() is not None
    del y
    gc.collect()
    assert last.columns() is None


def test_rows_have_no_siblings() -> None:
    model, optimizer = converted(dim=0)
    train(model, optimizer, 2)
    drawn = columns(model)
    assert drawn["q"] != drawn["k"]
