"""Exactly the bytes that the documentation names cross the link."""

from __future__ import annotations

from typing import Any

import pytest

from grass import Offload
from grass.compact_mode.layer import CompactLayer
from grass.machine.link import Link
from tests.offload.training import MODES, Mode, build, train


def traffic(mode: Mode, steps: int, **options: Any) -> tuple[Any, list[tuple[int, int]]]:
    """The model, and the bytes down and up of each step."""
    model, optimizer = build(mode, offload=Offload(), **options)
    engine, counts = optimizer.offload, []
    assert engine is not None
    for step in range(steps):
        train(model, optimizer, 1, first=step)
        engine.finish()
        link = engine.link(next(model.parameters()).device)
        assert isinstance(link, Link)
        counts.append((link.bytes_down, link.bytes_up))
    before = [(0, 0), *counts]
    return model, [(d - e, u - v) for (d, u), (e, v) in zip(counts, before, strict=False)]


@pytest.mark.parametrize("explore", [0, 4])
@pytest.mark.parametrize("selection", ["uniform", "multinomial_norm"])
def test_compact_mode(explore: int, selection: str) -> None:
    model, counts = traffic("compact", 9, explore=explore, selection=selection)
    layers = [module for module in model.modules() if isinstance(module, CompactLayer)]
    assert layers
    converted = {id(p) for layer in layers for p in (layer.weight, layer.active)}
    rest = sum(p.nbytes for p in model.parameters() if id(p) not in converted)
    assert rest > 0
    rows = 0
    for layer in layers:
        length = layer.shape[layer.dim]
        assert layer.weight.nbytes * (layer.rank + min(explore, length - layer.rank)) % length == 0
        rows += layer.weight.nbytes * (layer.rank + min(explore, length - layer.rank)) // length
    assert counts == [(rows + rest, rows + rest)] * 9


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode in ("full", "dense")])
def test_whole_weights(mode: Mode) -> None:
    model, counts = traffic(mode, 9)
    every = sum(p.nbytes for p in model.parameters())
    assert counts == [(every, every)] * 9


def test_more_precise_rows_come_up_too() -> None:
    model, counts = traffic("compact over bf16", 5, explore=4)
    layers = [module for module in model.modules() if isinstance(module, CompactLayer)]
    converted = {id(p) for layer in layers for p in (layer.weight, layer.active)}
    rest = sum(p.nbytes for p in model.parameters() if id(p) not in converted)
    down = sum(layer.active.nbytes for layer in layers)
    up = sum(layer.active.numel() * 2 + layer.selected_part(layer.rows()).numel() * 4 for layer in layers)
    assert counts == [(down + rest, up + rest)] * 5
