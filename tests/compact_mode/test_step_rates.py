"""The ``scale`` of an attached optimizer: a larger rate of the active rows in its steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import grass
from tests.compact_mode.networks import (
    batches,
    compact_layers,
    train,
)
from tests.compact_mode.test_attach import attached

SCALED: dict[str, Callable[[list[Tensor], float, float], torch.optim.Optimizer]] = {
    "AdamW": lambda p, lr, decay: torch.optim.AdamW(p, lr=lr, weight_decay=decay),
    "tensor": lambda p, lr, decay: torch.optim.AdamW(p, lr=torch.tensor(lr, dtype=torch.float64), weight_decay=decay),
    "decoupled": lambda p, lr, decay: torch.optim.NAdam(p, lr=lr, weight_decay=decay, decoupled_weight_decay=True),
    "SGD": lambda p, lr, decay: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Muon": lambda p, lr, decay: torch.optim.Muon(p, lr=lr, weight_decay=decay),
}


def test_scale_without_a_learning_rate() -> None:
    layer = nn.Linear(12, 8, bias=False)
    grass.compact(layer, rank=3)
    optimizer = torch.optim.SGD([layer.active], lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as transformers' Adafactor has by default
    grass.attach(optimizer, layer, scale="auto")
    layer.active.grad = torch.ones_like(layer.active)
    with pytest.raises(ValueError, match="Invalid scale='auto': a group of SGD has lr=None"):
        optimizer.step()


def test_scale_passes_over_the_frozen_weights_of_converted_layers() -> None:
    """As in ``AdamW(model.parameters())``: with the active rows alone in their group it is the same."""
    weights = []
    for every in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(12, 8, bias=False)
        grass.compact(layer, rank=3, explore=3)
        optimizer = torch.optim.AdamW(layer.parameters() if every else [layer.active])
        grass.attach(optimizer, layer, scale="auto")
        layer.active.grad = torch.ones_like(layer.active)
        optimizer.step()
        weights.append(layer.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("scale", ["auto", 2.0])
@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("explore", [0.25, 0])
def test_scale_is_a_larger_rate_with_the_same_decay(explore: float, make: Callable, scale: float | str) -> None:
    """Under a schedule, which sees the rate that was given."""
    times = 1.0 if scale == "auto" and not explore else 2.0  # n / (r + q)
    weights = []
    for lr, decay, options in ((0.04, 0.1, {"scale": scale}), (0.04 * times, 0.1 / times, {})):
        model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8)).double()
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        grass.compact(model, rank=0.25, explore=explore, targets="all-linear")
        optimizer = make([layer.active for layer in compact_layers(model).values()], lr, decay)
        grass.attach(optimizer, model, update_interval=2, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for number in range(5):
            model(torch.randn(4, 16, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(lr * 0.9 ** (number + 1))
            assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(decay if make is not SCALED["SGD"] else 0)
        weights.append([layer.matrix().clone() for layer in compact_layers(model).values()])
    for ours, expected in zip(*weights, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)  # float64: one rounding of the rate


def test_scale_says_what_it_is_and_which_groups_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 8))
    grass.compact(model, rank=4, explore=4, targets="all-linear")
    both = [model[0].active, model[1].active]
    for held, scale in ((both, "auto"), ([*both, model[0].bias], 2.0)):
        with pytest.raises(ValueError, match=r"scale=.*multiplied by .* make a group of each"):
            grass.attach(torch.optim.SGD(held, lr=0.1), model, scale=scale)
    apart = torch.optim.SGD([{"params": [each]} for each in (*both, model[0].bias)], lr=0.1)
    with caplog.at_level("INFO", logger="grass"):
        grass.attach(apart, model, scale="auto")
    assert "projected weights: lr x 1.5 to 2 (scale='auto')" in caplog.text


def test_groups_may_share_a_rate_that_is_a_tensor() -> None:
    """As torch makes them of ``lr=torch.tensor(...)``; the user's tensor stays as it is."""
    moved = []
    for lr in (1e-2, torch.tensor(1e-2, dtype=torch.float64)):
        model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 8)).double()
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        grass.compact(model, rank=2, explore=2, targets="all-linear")  # factors 4 and 3
        optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters() if p.requires_grad], lr=lr)
        grass.attach(optimizer, model, scale="auto")
        model(torch.ones(4, 16, dtype=torch.float64)).sum().backward()
        optimizer.step()
        moved.append([p.detach().clone() for p in model.parameters()])
        assert [float(group["lr"]) for group in optimizer.param_groups] == [1e-2] * 4
        assert float(lr) == 1e-2
    for ours, expected in zip(*moved, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)  # float64: one rounding of the rate


def test_hooks_of_the_step_see_and_set_rates(caplog: pytest.LogCaptureFixture) -> None:
    """Post-hooks from before see the user's rate and may change it. A pre-hook's rate stays, and a warning says so."""
    model = nn.Sequential(nn.Linear(16, 12, bias=False))
    grass.compact(model, rank=4, explore=4, targets="all-linear")
    optimizer = torch.optim.SGD([model[0].active], lr=0.08)
    (group,), seen = optimizer.param_groups, []

    def halve(*_: object) -> None:
        seen.append(group["lr"])
        group["lr"] /= 2

    hook = optimizer.register_step_post_hook(halve)
    grass.attach(optimizer, model, scale="auto")
    for _ in range(3):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    assert (seen, group["lr"]) == ([0.08, 0.04, 0.02], 0.01)
    hook.remove()
    assert not caplog.records
    optimizer.register_step_pre_hook(lambda *_: group.update(lr=0.5))
    for _ in range(2):
        optimizer.step()
        assert group["lr"] == 0.5
    (record,) = caplog.records
    assert "a hook of step() sets 'lr' of active rows" in record.message


def test_a_step_that_raises_leaves_the_rate() -> None:
    model, optimizer, attachment = attached(lambda p: torch.optim.SGD([t for t in p if t.ndim == 2], lr=0.1), scale=3.0)
    train(model, optimizer, batches(1))

    def broken() -> Tensor:
        raise KeyError("data")

    for _ in range(2):
        with pytest.raises(KeyError):
            optimizer.step(broken)
    train(model, optimizer, batches(1))
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(KeyError):
        optimizer.step(broken)
    attachment.close()
    assert optimizer.param_groups[0]["lr"] == 0.1
