"""What is built on compact mode hears of uses and changes of a layer's values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import grass
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.synced_rows import LastChange, Listener

from .networks import DIMS, batches, compact_layers, converted, train


class Heard(Listener):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_use(self) -> None:
        self.calls.append("use")

    def before_saving(self) -> None:
        self.calls.append("saving")

    def before_loading(self) -> None:
        self.calls.append("loading")

    def before_change(self, layer: CompactLayer) -> None:
        self.calls.append("change")

    def after_change(self, layer: CompactLayer, *, everything: bool) -> None:
        self.calls.append(f"changed {'everything' if everything else 'rows'}")

    def taken(self) -> list[str]:
        """What was heard since the last call, without repetitions."""
        calls, self.calls = list(dict.fromkeys(self.calls)), []
        return calls


@pytest.mark.parametrize(("decay", "what"), [("selected", "changed rows"), ("all", "changed everything")])
def test_a_listener_hears_each_use_and_change(decay: str, what: str) -> None:
    model, optimizer = converted(decay=decay, weight_decay=0.1)
    layer, (batch,) = compact_layers(model)["up"], batches(1)
    layer.listeners = (heard := Heard(),)
    model(batch[0])
    assert heard.taken() == ["use"]
    train(model, optimizer, [batch])
    assert heard.taken() == ["use", "change", what]
    state = model.state_dict()
    assert heard.taken() == ["saving", "use"]
    model.load_state_dict(state)
    assert heard.taken()[0] == "loading"
    twin = copy.deepcopy(model)
    assert heard.taken() == ["saving", "use"]
    assert not compact_layers(twin)["up"].listeners
    grass.expand(model)
    assert not hasattr(model.up, "listeners")


@pytest.mark.parametrize("dim", DIMS)
def test_the_last_change_names_the_rows_that_differ(dim: int) -> None:
    """A copy of the weight that takes these rows over after each step stays equal to it."""
    model, optimizer = converted(dim=dim, explore=2, update_interval=3)
    layer = compact_layers(model)["up"]
    layer.listeners = (change := LastChange(),)
    held = layer.weight.detach().clone()
    for number, batch in enumerate(batches(7), 1):
        train(model, optimizer, [batch])
        assert change.number == number
        assert change.rows is not None
        rows = change.rows
        held.index_copy_(dim, rows, layer.weight.detach().index_select(dim, rows))
        assert torch.equal(held, layer.weight)


def test_a_weight_that_is_written_late_says_so() -> None:
    """A step leaves the weight as it is, until other rows are selected: then everything counts as changed."""
    model = nn.Sequential(nn.Linear(8, 8))
    grass.compact(model, rank=2, explore=0)
    layer = model[0]
    optimizer = grass.GrassAdamW(model, lr=0.1, update_interval=2)
    layer.synced.late = True
    layer.mark_synced()
    layer.listeners = (change := LastChange(),)
    before = layer.weight.detach().clone()
    for step in (1, 2):
        layer(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        assert (change.rows is None) == (step == 2)
    assert not torch.equal(before, layer.weight)
