"""Weights that other code than their layer computes with: left at full rank, or refused in the second step."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import assert_same_weights


class Reader(nn.Module):
    """A block; ``read`` computes with ``proj`` as the subclasses say."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner, self.items = nn.ModuleDict({"x": nn.Linear(8, 8)}), nn.ModuleList([nn.Linear(8, 8)])
        self.slow = False

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.read(x))

    def read(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Direct(Reader):
    """By a method of a subclass, named by an inherited forward."""

    def read(self, x: Tensor) -> Tensor:
        return F.linear(x, self.proj.weight)


class Inherited(Direct):
    """The source of this class shows nothing."""


class Local(Reader):
    def read(self, x: Tensor) -> Tensor:
        proj = self.proj
        return F.linear(x, proj.weight)


class Item(Reader):
    def read(self, x: Tensor) -> Tensor:
        return F.linear(x, self.items[0].weight)


class Outer(nn.Module):
    """Reads a weight two modules below."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Local()

    def forward(self, x: Tensor) -> Tensor:
        return self.block.up(F.linear(x, self.block.proj.weight))


class Fused(Reader):
    """As diffusers' attention: a method that training does not call reads the weight, and so does a branch."""

    def read(self, x: Tensor) -> Tensor:
        return F.linear(x, self.proj.weight) if self.slow else self.proj(x)

    def fuse_projections(self) -> Tensor:
        return torch.cat([self.proj.weight, self.up.weight])


class Skipped(Reader):
    def read(self, x: Tensor) -> Tensor:
        return x.to(self.proj.weight.dtype)


def train(model: nn.Module, optimizer: Any, steps: int, loss: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(torch.ones(2, 8)).square().sum()
        (y if loss is None else loss(y)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("cls", "kept"), [(Direct, "proj"), (Inherited, "proj"), (Outer, "block.proj"), (Fused, None), (Skipped, None)]
)
def test_source_shows_reads_of_what_forward_reaches(cls: type[nn.Module], kept: str | None) -> None:
    model = cls()
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert set(grass.compact(model, rank=2, targets="all-linear")) == linears - {kept}


def test_a_branch_that_is_taken_counts() -> None:
    model = Fused()
    model.slow = True
    assert "proj" not in grass.compact(model, rank=2, targets="all-linear")


def test_projections_of_multihead_attention() -> None:
    from grass.compact_mode.unconvertible import unconvertible

    assert "reads its weight" in unconvertible(nn.TransformerEncoderLayer(8, 2))["self_attn.out_proj"]


@pytest.mark.parametrize(("slow", "reads"), [(False, 0), (True, 2)])
def test_bloom_is_converted_whole_unless_it_slices_its_weights(slow: bool, reads: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 11}
    model = transformers.BloomModel(transformers.BloomConfig(**sizes, pretraining_tp=2, slow_but_exact=slow))
    assert len(grass.compact(model, rank=2)) == 4 - reads


class Called(Reader):
    def read(self, x: Tensor) -> Tensor:
        return self.proj(x)


@pytest.mark.parametrize("attached", [False, True])
def test_unfrozen_weights_do_not_train_by_a_penalty(attached: bool) -> None:
    """As by a loop that freezes and unfreezes all parameters, and gives all of them to the optimizer."""
    runs = []
    for penalty in (0.0, 1e-3):
        torch.manual_seed(0)
        model = Called()
        grass.compact(model, rank=2, targets=["proj", "up"])
        cls: Any = torch.optim.AdamW if attached else GrassAdamW
        optimizer = cls(model.parameters(), weight_decay=0.0)
        attachment = grass.attach(optimizer, model) if attached else None
        for _ in range(4):
            model.requires_grad_(False).requires_grad_(True)
            weights = model.proj.weight.square().sum() + model.up.weight.square().sum()
            (model(torch.ones(2, 8)).square().sum() + penalty * weights).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.proj.weight not in optimizer.state
        assert (attachment is not None) == attached
        runs.append(model)
    assert_same_weights(*runs)


@pytest.mark.parametrize(("cls", "label"), [(Local, "proj"), (Item, "items.0")])
@pytest.mark.parametrize("under", ["grass", "attach", "checkpoint"])
def test_reads_that_source_does_not_show_are_refused_in_the_second_step(cls: Any, label: str, under: str) -> None:
    model = cls()
    grass.compact(model, rank=2, targets=["proj", "up", "items.0"])
    if under == "attach":
        optimizer: Any = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        attachment = grass.attach(optimizer, model)
        assert attachment
    else:
        optimizer = GrassAdamW(model)
    called: Any = model
    if under == "checkpoint":
        called = lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)  # noqa: E731
    train(called, optimizer, 1)
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=rf"exclude=\['{label}'\]"):
        train(called, optimizer, 1)
    assert_same_weights(model, before)


def test_layers_that_are_not_used_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Their weights may also be read for anything but computing, and frozen rows stay frozen."""
    model = Skipped()
    grass.compact(model, rank=2, targets="all-linear")
    model.inner["x"].active.requires_grad_(False)
    optimizer = GrassAdamW(model, update_interval=50)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "grass"):
        train(model, optimizer, 4)
    assert not caplog.records
    assert not model.inner["x"].weight.requires_grad
    assert not model.up.weight.requires_grad


def test_a_layer_used_later_trains_and_is_no_longer_watched() -> None:
    model = Fused()
    grass.compact(model, rank=2, targets=["proj", "up"])
    optimizer = GrassAdamW(model)
    model.read = lambda x: x  # type: ignore[method-assign]
    train(model, optimizer, 2)
    assert model.proj.weight.requires_grad
    del model.read
    before = model.proj.weight.detach().clone()
    train(model, optimizer, 2)
    assert not model.proj.weight.requires_grad
    assert model.proj.weight.grad is None
    assert not torch.equal(model.proj.weight, before)


def test_copies_and_new_optimizers_see_frozen_weights() -> None:
    model = Skipped()
    grass.compact(model, rank=2, targets=["proj", "up"])
    optimizer = GrassAdamW(model)
    train(model, optimizer, 1)
    assert model.proj.weight.requires_grad
    assert not copy.deepcopy(model).proj.weight.requires_grad
    train(model, optimizer, 1)
    names = {name for group in GrassAdamW(model).param_groups for name in group["param_names"]}
    assert "proj.active" in names
    assert not names & {"proj.weight", "up.weight"}


def test_weights_that_cannot_be_watched_are_named_soon(caplog: pytest.LogCaptureFixture) -> None:
    model = Fused()
    grass.compact(model, rank=2, targets=["proj", "up"], weights="int8")
    model.read = lambda x: x  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "grass"):
        train(model, GrassAdamW(model), 2)
    assert "1 weights got no gradient and do not train: 'proj' (in 2 steps)" in caplog.text


def test_compiled_models_are_refused_too() -> None:
    model = Local()
    grass.compact(model, rank=2, targets=["proj", "up"])
    optimizer = GrassAdamW(model)
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"exclude=\['proj'\]"):
        train(compiled, optimizer, 1)
