"""The loss tables of the study."""

import runpy
import sys
from pathlib import Path

import pytest

runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "figures.py"))
source, study = sys.modules["page_tables.source"], sys.modules["page_tables.study"]
CELL = {"task": "pretrain", "model": "1m", "steps": "540", "optimizer": "adamw", "settings": "lr=0.002"}


@pytest.fixture
def cells(monkeypatch):
    rows = [
        {**CELL, "seed": str(seed), "loss_100": loss, "state_bytes": "8"} for seed, loss in ((1, "2.0"), (0, "1.0"))
    ]
    ours = source.ALIASES["@dense"].partition("settings=")[2]
    rows.append({**rows[0], "optimizer": "grass", "settings": ours, "state_bytes": "2"})
    monkeypatch.setattr(source, "read", lambda name: rows)


def test_means_and_shares(cells) -> None:
    assert study.losses("@adamw", "540") == [1.0, 2.0]
    assert study.losses("@adamw", "2150") == []
    assert study.shown([1.0, 2.0]) == "**1.500** (1.000 2.000)"
    assert study.shown([1.0]) == "1.000 (one seed)"
    assert study.shown([]) == "not run"
    assert study.share("@dense", "state_bytes") == "0.25"


def test_every_method_of_the_loss_table_has_cells() -> None:
    table = study.loss().splitlines()[2:]
    assert len(table) == len(study.METHODS)
    assert not any(line.count("not run") == len(study.HORIZONS) for line in table)


@pytest.mark.parametrize("name", ["explored", "learning rate + seeds", "prototypes"])
def test_study_tables_say_the_options_of_each_row(name) -> None:
    header, _, *rows = study.study(name).splitlines()
    assert rows
    for row in rows:
        assert "lr=" in row or "lr=" in header


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ({0.1: (3.0,), 0.2: (2.0, 9.0), 0.4: (2.5,)}, 0.2),  # the first seed's, although the other's mean is lower
        ({0.1: (2.0,), 0.2: (1.0, 3.5), 0.4: (1.5, 2.0)}, 0.4),  # as many seeds, and a lower mean
    ],
)
def test_the_best_rate_of_a_finetuning_method(losses, best) -> None:
    rates = {
        rate: [{"seed": str(seed), "loss_100": str(loss)} for seed, loss in enumerate(of)]
        for rate, of in losses.items()
    }
    assert sys.modules["page_tables.finetuning"]._best(rates) == best
