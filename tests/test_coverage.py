"""The line that tells how much of a model Grass covers."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import grass
from grass.coverage import silent

SETUPS = {"converted": grass.compact, "projects": grass.param_groups}
LAYERS = 2


class Experts(nn.Module):
    """Experts as transformers 5 holds them: all in two 3-D parameters, beside a router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up_proj = nn.Parameter(torch.randn(4, 32, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Mixture(nn.Module):
    """A stack of attention and experts between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attn": nn.Linear(8, 8), "mlp": Experts(), "norm": nn.LayerNorm(8)}) for _ in range(LAYERS)
        )
        self.lm_head = nn.Linear(8, 16, bias=False)


def mostly_linear() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(30, 30, bias=False), "lm_head": nn.Linear(5, 20, bias=False)})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    caplog.set_level(logging.INFO, "grass")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(("verb", "setup"), SETUPS.items(), ids=SETUPS)
def test_one_line_names_share_and_head(lines, verb, setup) -> None:
    setup(mostly_linear(), rank=2)
    expected = f"Grass: {verb} 1 of 2 linear layers, 90.0% of parameters; at full rank: lm_head (output head, 10.0%)"
    assert lines() == [("INFO", expected)]


@pytest.mark.parametrize(("verb", "setup"), SETUPS.items(), ids=SETUPS)
def test_experts_count_and_are_named(lines, verb, setup) -> None:
    model = Mixture()
    total = sum(p.numel() for p in model.parameters())
    setup(model, rank=2)
    ((level, line),) = lines()
    assert level == "WARNING"
    assert f"{verb} 4 of 5 linear layers, only {LAYERS * (8 * 8 + 4 * 8) / total:.1%} of parameters" in line
    experts = f"{LAYERS * 4 * 32 * 8 / total:.1%}"
    assert f"layers.*.mlp.up_proj (3-D, {experts}), layers.*.mlp.down_proj (3-D, {experts})" in line
    assert "embed (embedding, " in line


def test_converting_the_rest_counts_both_parts(lines) -> None:
    model = mostly_linear()
    grass.compact(model, rank=2)
    grass.compact(model, rank=2, targets=["lm_head"])
    assert lines()[1] == ("INFO", "Grass: converted 2 of 2 linear layers, 100.0% of parameters")


def test_frozen_weights_do_not_count(lines) -> None:
    model = mostly_linear()
    model["lm_head"].requires_grad_(False)
    grass.compact(model, rank=2)
    assert lines() == [("INFO", "Grass: converted 1 of 2 linear layers, 100.0% of parameters")]


def test_only_the_largest_are_named(lines) -> None:
    body = {"body": nn.Linear(40, 40, bias=False)}
    tables = {f"table_{name}": nn.Embedding(2 + i, 4) for i, name in enumerate("abcdef")}
    grass.compact(nn.ModuleDict(body | tables), rank=2)
    ((_, line),) = lines()
    names = [part.split(" ")[0] for part in line.split("full rank: ")[1].split("), ")]
    assert names == ["table_f", "table_e", "table_d", "table_c", "2"]


def test_silence_for_callers_that_convert_in_pieces(lines) -> None:
    with silent():
        grass.compact(mostly_linear(), rank=2)
    assert lines() == []


LOGGING = {
    "not configured": ("", 1),
    "configured for INFO": ("logging.basicConfig(level='INFO')", 1),
    "configured": ("logging.basicConfig()", 0),
    "the logger's own level": ("logging.getLogger('grass').setLevel('WARNING')", 0),
    "disabled": ("logging.disable(logging.INFO)", 0),
    "a later process": ("import os; os.environ['RANK'] = '1'", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("configure", "count"), LOGGING.values(), ids=LOGGING)
def test_what_users_see(configure: str, count: int) -> None:
    """On stderr unless logging is configured, and never twice; the process is new, as pytest configures logging."""
    code = f"import logging, grass, torch; {configure or 'pass'}; grass.compact(torch.nn.Linear(4, 4), rank=2)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.count("Grass: converted 1 of 1 linear layers, 80.0% of parameters") == count
    assert run.stdout == ""
