"""Dense mode on experts equals dense mode on each expert's own matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grass
from grass import GrassAdamW
from tests.experts.models import EXPERTS, Experts, Separate, batch, train

TOP: dict[str, Any] = {"selection": "top_r", "lr": 1e-2}


def pair(dim: int, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A module of experts and separate layers, with an optimizer each."""
    torch.manual_seed(0)
    experts = Experts()
    separate = Separate(experts)
    # `down` is stored inputs first, so its other dimension has the same rows
    values = {"rank": 3, **TOP, **options}
    together = GrassAdamW(
        [
            {"params": [experts.up], "experts": True, "dim": dim},
            {"params": [experts.down], "experts": True, "dim": 1 - dim},
        ],
        **values,
    )
    alone = GrassAdamW(separate.parameters(), dim=dim, **values)
    return experts, together, separate, alone


TOLERANCE = {"keep": 1e-10, "bank": 1e-10, "reset": 1e-7}
"""float64, sums in another order. With ``reset``, experts count each row's steps in float32, one matrix as integers."""


def assert_same(experts: Any, separate: Any, policy: str) -> None:
    tolerance = {"rtol": TOLERANCE[policy], "atol": TOLERANCE[policy]}
    for number, (up, down) in enumerate(separate.pairs):
        torch.testing.assert_close(experts.up[number], up.weight, **tolerance)
        torch.testing.assert_close(experts.down[number], down.weight.t(), **tolerance)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("explore", [0, 1.0])
@pytest.mark.parametrize("policy", ["keep", "reset", "bank"])
def test_equals_separate_matrices(dim: int, explore: float, policy: str) -> None:
    options = {"update_interval": 3, "explore": explore, "state_policy": policy}
    experts, together, separate, alone = pair(dim, **options)
    losses = train(experts, together, 10, rests=False)
    assert losses == pytest.approx(train(separate, alone, 10, rests=False), rel=TOLERANCE[policy])
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    assert_same(experts, separate, policy)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("explore", [0, 1.0])
@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_experts_without_tokens_rest(dim: int, explore: float, policy: str) -> None:
    options = {"update_interval": 1000, "explore": explore, "state_policy": policy}
    experts, together, separate, alone = pair(dim, **options)
    losses = train(experts, together, 9)
    assert losses == pytest.approx(train(separate, alone, 9), rel=TOLERANCE[policy])
    assert_same(experts, separate, policy)
    ages = together.state[experts.up]["row_steps"].view(EXPERTS, -1)
    assert ages.unique(dim=1).flatten().tolist() == [6.0, 6.0, 6.0, 9.0]


def test_an_expert_that_rests_in_a_refresh_keeps_its_rows() -> None:
    experts, together, *_ = pair(0, update_interval=2)
    train(experts, together, 1)
    before = together.state[experts.up]["indices"].view(EXPERTS, -1).clone()
    train(experts, together, 1, 1)
    assert together.state[experts.up]["refresh_step"] == 0
    x, ends = batch(4)
    (experts(x, ends) - x.roll(1, 1)).square().sum().backward()
    together.step()
    after = together.state[experts.up]["indices"].view(EXPERTS, -1)
    assert together.state[experts.up]["refresh_step"] == 2
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("policy", ["keep", "bank"])
def test_resume_is_exact(policy: str, dim: int) -> None:
    options = {"update_interval": 3, "explore": 2, "selection": "multinomial_norm", "state_policy": policy}
    experts, together, *_ = pair(dim, **options)
    train(experts, together, 5)
    model, optimizer, *_ = pair(dim, **options)
    model.load_state_dict(experts.state_dict())
    optimizer.load_state_dict(together.state_dict())
    assert train(model, optimizer, 6, 5) == train(experts, together, 6, 5)


def test_param_groups_find_experts() -> None:
    model = torch.nn.ModuleDict({"a": Experts(), "b": torch.nn.Linear(4, 4).double()})
    first, second = grass.param_groups(model, rank=2)
    assert [name for name, _ in first["params"]] == ["a.up", "a.down", "b.weight"]
    assert first["experts"]
    assert [name for name, _ in second["params"]] == ["b.bias"]
    first, _ = grass.param_groups(model, rank=2, exclude=["down"])
    assert [name for name, _ in first["params"]] == ["a.up", "b.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moment_dtype": "8bit"}, "8bit"),
        ({"replacement": True, "selection": "uniform"}, "replacement"),
        ({"decay": "all"}, "decay"),
        ({"rank": 11}, "rank=11"),
        ({"explore": 8}, "explore=8"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair(1, **options)
