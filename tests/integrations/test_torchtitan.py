"""torchtitan's Trainer with both overrides, from its command line's arguments. Skipped where it is not installed.

torchtitan 0.3.0 asks for another version of ``datasets`` than Trainer's tests. ``docs/integrations.md`` says how to
install it beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from titan.run import trained, write_data

from tests.distributed.world import run_world
from tests.integrations.runs import assert_same

pytest.importorskip("torchtitan", exc_type=ImportError)

STEPS, SAVED = 6, 3
TENSOR = ["--parallelism.tensor_parallel_degree", "2"]
SAVING = ["--checkpoint.enable"]
EQUAL = {"rtol": 1e-5, "atol": 2e-6}
"""float32, six steps of 1e-3: sums of other blocks differ in the last places, and Adam divides by them."""


def grass(conversion: dict[str, Any], **options: Any) -> list[str]:
    """What activates both overrides."""
    module = "grass.integrations.torchtitan"
    both = {"linear": conversion, "optimizer": options}
    return ["--override.imports", *(f"{module}.{name}={json.dumps(values)}" for name, values in both.items())]


QUARTER = grass({"rank": 0.25}, update_interval=2)
WHOLE = grass({"rank": 1.0, "explore": 0})
"""Every column, which is AdamW."""

WORLDS = [
    pytest.param(1, [], id="alone"),
    pytest.param(2, [], id="fsdp2"),
    pytest.param(2, TENSOR, id="tensor"),
    pytest.param(4, TENSOR, id="fsdp2 x tensor"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), WORLDS)
def test_equals_adamw_with_every_column_and_resumes(folder: Path, ranks: int, parallel: list[str]) -> None:
    """In one world, as each process takes seconds to import torchtitan."""
    saving = [*QUARTER, *parallel, *SAVING]
    runs = [parallel, [*WHOLE, *parallel], saving, [*saving, "--checkpoint.load_step", str(SAVED)]]
    for adamw, every, first, resumed in run_world(trained, ranks, folder, runs):
        torch.testing.assert_close(every["weights"], adamw["weights"], **EQUAL)
        torch.testing.assert_close(every["losses"], adamw["losses"], **EQUAL)
        assert first["trained"] < adamw["trained"]
        assert first["weights"].keys() == adamw["weights"].keys()
        assert len(first["losses"]) == STEPS
        assert first["losses"][-1] < first["losses"][0]
        for part in ("weights", "state"):
            assert_same(resumed[part], first[part])
        assert resumed["losses"] == first["losses"][SAVED:]
        if ranks == 4:
            assert "(Shard(dim=0), Shard(dim=1))" in first["places"]


def test_what_is_refused() -> None:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw

    from grass.integrations.torchtitan import draw_columns, linear, optimizer

    with pytest.raises(TypeError, match="Grass takes no rank here: must be one of amsgrad"):
        optimizer(default_adamw(), rank=0.25)
    muon = OptimizersContainer.Config(param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="DistMuon")])
    with pytest.raises(ValueError, match="Invalid optimizer_name='DistMuon' of a group"):
        optimizer(muon)
    config = default_adamw()
    config.implementation = "fused_opt_states_bf16"
    with pytest.raises(ValueError, match="pass moment_dtype='bfloat16'"):
        optimizer(config)
    from torchtitan.models.common.linear import Linear

    with pytest.raises(ValueError, match=r"fields not on .*'seed'"):
        linear(Linear.Config(in_features=4, out_features=4), seed=1)
    with pytest.raises(ValueError, match=r"has no converted layers: activate grass.integrations.torchtitan.linear"):
        draw_columns(torch.nn.Linear(4, 4), 0)
