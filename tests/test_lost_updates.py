"""A warning where half precision loses the updates of large parameters at full rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW
from grass.lost_updates import PERIOD


class Tables(nn.Module):
    """An embedding of which half of the rows get no gradient, and a norm."""

    def __init__(self, dtype: torch.dtype, value: float) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((600, 128), value, dtype=dtype))
        self.norm = nn.Parameter(torch.ones(128, dtype=dtype))


def test_active_rows_too(caplog: pytest.LogCaptureFixture) -> None:
    """Weights of 1.0 and a rate of 2e-5: no bfloat16 row moves, float32 and stochastically rounded ones do."""

    def warned(**kinds: Any) -> list[str]:
        caplog.clear()
        model = nn.Linear(128, 512, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        grass.compact(model, rank=0.25, dtype=kinds.get("dtype"))
        optimizer = GrassAdamW(model, lr=2e-5, stochastic_rounding=kinds.get("stochastic_rounding", False))
        for _ in range(2 * PERIOD + 1):
            model(torch.ones(2, 128, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [record.getMessage() for record in caplog.records if "are lost" in record.getMessage()]

    (message,) = warned()
    assert "'active' (100% of the elements with a gradient)" in message
    assert "grass.compact(dtype=torch.float32)" in message
    assert not warned(dtype=torch.float32)
    assert not warned(stochastic_rounding=True)


def test_weights_of_dense_mode_if_all_rows_move(caplog: pytest.LogCaptureFixture) -> None:
    def warned(dtype: torch.dtype = torch.bfloat16, **options: Any) -> bool:
        caplog.clear()
        model = nn.Sequential(nn.Linear(128, 1024, bias=False, dtype=dtype))
        nn.init.ones_(model[0].weight)
        groups = grass.param_groups(model, rank=0.25, targets="all-linear")
        optimizer = GrassAdamW(groups, **{"lr": 2e-5, **options})
        for _ in range(2 * PERIOD + 1):
            model(torch.ones(2, 128, dtype=dtype)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return "'0.weight' (100% of the elements with a gradient)" in caplog.text

    assert warned()
    assert warned(explore=1.0)
    for silent in ({"dtype": torch.float32}, {"stochastic_rounding": True}, {"explore": 0}, {"lr": 1e-2}):
        assert not warned(**silent)


def test_silent_at_the_end_of_a_schedule(caplog: pytest.LogCaptureFixture) -> None:
    model = Tables(torch.bfloat16, 0.01)
    optimizer = GrassAdamW(model.named_parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * PERIOD))
    for _ in range(2 * PERIOD):
        (model.embed.float().sum() + model.norm.float().sum()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert not caplog.records


def trained(
    dtype: torch.dtype = torch.bfloat16, lr: float = 1e-3, value: float = 1.0, in_backward: bool = False, **options: Any
) -> Tables:
    model = Tables(dtype, value)
    optimizer = GrassAdamW(model.named_parameters(), lr=lr, **options)
    if in_backward:
        grass.step_in_backward(optimizer)
    for _ in range(2 * PERIOD + 1):
        (model.embed[:300].float().sum() + model.norm.float().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"in_backward": True}, {"offload": "cpu"}], ids=str)
def test_names_what_does_not_move(dtype: torch.dtype, options: dict, caplog: pytest.LogCaptureFixture) -> None:
    lr = 1e-3 if dtype == torch.bfloat16 else 1e-4
    with caplog.at_level(logging.WARNING, "grass"):
        model = trained(dtype, lr, **options)
    assert torch.equal(model.embed, torch.ones_like(model.embed))
    (message,) = [record.getMessage() for record in caplog.records if "are lost" in record.getMessage()]
    assert "'embed' (100% of the elements with a gradient)" in message
    assert "stochastic_rounding=True" in message
    assert "norm" not in message


@pytest.mark.parametrize(
    "options",
    [
        {"stochastic_rounding": True},
        {"dtype": torch.float32},
        {"value": 0.02},  # spacing 1/8192
        {"lr": 0.0},
        {"offload": grass.Offload(masters=True)},
    ],
    ids=str,
)
def test_silent_otherwise(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "grass"):
        trained(**options)
    assert not [record for record in caplog.records if "are lost" in record.getMessage()]
