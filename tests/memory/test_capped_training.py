"""The GPU suite's capped runs, tiny and without a cap."""

import dataclasses
import runpy
from pathlib import Path

import pytest
from page_tables.setups import flags

from grass.memory import parse_bytes
from tests.training.runs import PRETRAIN

script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench" / "capped_training.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["13b_40gb", pytest.param("13b_24gb", marks=pytest.mark.soak)])
def test_trains_through_refreshes_with_falling_loss(name):
    case = dataclasses.replace(script["CASES"][name], model="1m", rank=16, explore=4, lr=1e-3)
    row = script["run"](case, 32, "cpu")
    assert (row["steps"], row["refreshes"]) == (20, 2)
    assert row["last_loss"] < 0.9 * row["first_loss"]
    assert script["complaints"](row, accelerated=False) == []


def test_what_is_complained_of():
    row = {"model": "13b", "cap": "40GB", "first_loss": 5.0, "last_loss": 5.5, "peak_over_planned": 1.06}
    assert script["complaints"](row, accelerated=True) == [
        "13b in 40GB: the loss went from 5.000 to 5.500",
        "13b in 40GB: the peak is 1.060 of the plan",
    ]
    assert len(script["complaints"](row, accelerated=False)) == 1


def test_every_case_is_planned_to_fit():
    from grass.memory import plan
    from grass.memory.models import load_architecture

    for case in script["CASES"].values():
        planned = plan("Grass int8" if case.weights else "Grass", load_architecture(case.model), case.setting())
        assert planned.total <= parse_bytes(case.cap), case


def test_the_cases_are_the_recipes():
    parser = runpy.run_path(str(PRETRAIN))["argument_parser"]()
    for name, case in script["CASES"].items():
        args = parser.parse_args(flags(PRETRAIN.parent / "recipes" / f"pretrain_llama_{name}.sh"))
        assert (case.rank, case.explore, case.weights) == (args.rank, args.explore, args.weights)
        assert (args.moment_dtype, args.active_dtype, args.stochastic_rounding) == ("8bit", "bfloat16", True)
