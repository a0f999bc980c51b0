"""The registry of converted layers finds what lives, costs other models nothing, and keeps nothing alive."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import grass
from grass.compact_mode import registry
from grass.compact_mode.layer import CompactLayer

from .networks import batches, compact_layers, converted, train


def build_and_train(through: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after three steps."""
    if through == "GrassAdamW":
        model, optimizer = converted()
    else:
        model, _ = converted()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        grass.attach(optimizer, model, update_interval=2)
    train(model, optimizer, batches(3))
    return model, optimizer


FOREIGN_STEP = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 16)).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
def test_an_unpickled_model_is_watched_in_a_process_that_converts_nothing(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(16, 32))
    grass.compact(model, rank=0.25)
    torch.save(model, tmp_path / "whole.pt")
    command = [sys.executable, "-c", FOREIGN_STEP, str(tmp_path / "whole.pt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "would train active rows that never reach the model's weights" in result.stderr


@pytest.mark.parametrize("through", ["GrassAdamW", "attach"])
def test_nothing_is_left_behind(through: str) -> None:
    gc.collect()
    before = set(map(id, registry.LAYERS)), len(registry._CHECKED)
    for _ in range(3):
        model, optimizer = build_and_train(through)
        layers = list(compact_layers(model).values())
        assert len(registry.LAYERS) == len(before[0]) + len(layers)
        references = [weakref.ref(item) for item in (model, optimizer, *layers, *(layer.active for layer in layers))]
        del model, optimizer, layers
        gc.collect()
        assert all(reference() is None for reference in references)
        assert (set(map(id, registry.LAYERS)), len(registry._CHECKED)) == before


def test_steps_do_not_search_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a trained optimizer's steps nor those of an optimizer without converted layers."""
    model, optimizer = converted()
    plain = nn.Linear(4, 4)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step_other() -> None:
        plain(torch.ones(2, 4)).sum().backward()
        other.step()

    train(model, optimizer, batches(1))
    step_other()

    def searched(self: object) -> None:
        raise AssertionError("a step searched all layers")

    monkeypatch.setattr(type(registry.LAYERS), "__iter__", searched)
    train(model, optimizer, batches(3))
    step_other()
    monkeypatch.undo()
    assert any(isinstance(layer, CompactLayer) for layer in registry.LAYERS)
