"""The loss tables have the figures of the CSV."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def loss_table():
    spec = importlib.util.spec_from_file_location("loss_table", ROOT / "scripts" / "study" / "loss_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_have_the_figures_of_the_csv() -> None:
    module = loss_table()
    for page in module.PAGES:
        text = page.read_text()
        shown = text[text.index(module.BEGIN) + len(module.BEGIN) : text.index(module.END)]
        assert shown.strip() == module.table().strip(), page.name


def test_means_and_shares() -> None:
    module = loss_table()
    method = module.Method("ours", "adamw", "lr=1")
    cell = {"task": "pretrain", "model": "1m", "steps": "540", "optimizer": "adamw", "settings": "lr=1"}
    cells = [{**cell, "seed": str(seed), "loss_100": loss} for seed, loss in ((1, "2.0"), (0, "1.0"))]
    assert module.losses(cells, method, "540") == [1.0, 2.0]
    assert module.shown([1.0, 2.0]) == "**1.500** (1.000 2.000)"
    assert module.shown([1.0]) == "1.000 (one seed)"
    assert module.shown([]) == "not run"
