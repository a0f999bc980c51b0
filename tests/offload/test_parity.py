"""An optimizer whose state is on the host trains bit for bit as the resident one does."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grass
from grass import GrassAdamW, Offload
from grass.stepping.optimizer_step import OptimizerStep
from tests.offload.training import MODES, Mode, build, same, train

OPTIONS: list[dict[str, Any]] = [
    {},
    {"selection": "multinomial_norm", "state_policy": "bank"},
    {"selection": "top_r", "state_policy": "reset", "refresh": "exact"},
    {"decay": "all", "weight_decay": 0.1},
    {"moment_dtype": "8bit"},
    {"stochastic_rounding": True, "warmup_after_refresh": 2},
    {"explore": 0},
]
SLOW = Offload(_bytes_per_second=3e6)


def outcome(model: nn.Module, optimizer: GrassAdamW, losses: list[float]) -> tuple[Any, ...]:
    return losses, dict(model.state_dict()), optimizer.state_dict()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_resident_optimizer(mode: Mode, options: dict[str, Any]) -> None:
    results = []
    for offload in (None, SLOW):
        model, optimizer = build(mode, offload=offload, **options)
        results.append(outcome(model, optimizer, train(model, optimizer, 13)))
    assert same(*results)


@pytest.mark.parametrize(
    ("policy", "fraction"), [pytest.param("keep", 0.0, marks=pytest.mark.slow), ("bank", 0.0), ("keep", 1.0)]
)
@pytest.mark.parametrize("mode", MODES)
def test_state_may_lie_in_files(
    mode: Mode, policy: str, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grass.offload.host_storage.SMALLEST", 256)
    results = []
    for offload in (None, Offload(path=tmp_path, fraction=fraction)):
        model, optimizer = build(mode, offload=offload, selection="multinomial_norm", state_policy=policy)
        results.append(outcome(model, optimizer, train(model, optimizer, 13)))
    assert same(*results)
    assert list(tmp_path.iterdir())
    state = next(state for state in optimizer.state.values() if state["exp_avg"].nbytes >= 256)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert state["exp_avg"].untyped_storage().is_shared()
    del model, optimizer, state
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fraction", [0.3, 0.5, 1.0, "auto"])
@pytest.mark.parametrize("mode", MODES)
def test_any_fraction_may_be_stepped_on_the_device(mode: Mode, fraction: float | str) -> None:
    results = []
    for offload in (None, Offload(fraction=fraction, _bytes_per_second=3e6)):
        model, optimizer = build(mode, offload=offload, selection="multinomial_norm", state_policy="bank")
        results.append(outcome(model, optimizer, train(model, optimizer, 13)))
    assert same(*results)
    assert optimizer.offload is not None
    assert "predicted" in repr(optimizer.offload)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_freezing_and_a_second_group(mode: Mode) -> None:
    results = []
    for offload in (None, SLOW):
        model, optimizer = build(mode, offload=offload)
        extra = nn.Linear(16, 16, dtype=model[0].weight.dtype)
        named = "param_names" in optimizer.param_groups[0]
        params = list(extra.named_parameters()) if named else list(extra.parameters())
        optimizer.add_param_group({"params": params, "lr": 3e-3, "rank": None})
        losses = []
        for step in range(8):
            for p in extra.parameters():
                p.requires_grad_(step not in (3, 4))
            for _ in range(2):
                x = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
                y = extra(model[0](x))
                for module in list(model)[1:]:
                    y = module(y)
                loss = y.float().square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((outcome(model, optimizer, losses), dict(extra.state_dict())))
    assert same(*results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("first", "second"), [(None, SLOW), (SLOW, None), (SLOW, SLOW)])
def test_state_dicts_are_interchangeable(mode: Mode, first: Offload | None, second: Offload | None) -> None:
    options = {"selection": "multinomial_norm", "state_policy": "bank"}
    expected_model, expected = build(mode, **options)
    losses = train(expected_model, expected, 12)

    model, optimizer = build(mode, offload=first, **options)
    before = train(model, optimizer, 7)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = build(mode, offload=second, **options)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    after = train(model, optimizer, 5, first=7)
    assert same(outcome(model, optimizer, before + after), outcome(expected_model, expected, losses))


@pytest.mark.parametrize("mode", MODES)
def test_copies_go_on_alike(mode: Mode) -> None:
    model, optimizer = build(mode, offload=SLOW)
    train(model, optimizer, 7)
    assert optimizer.offload is not None
    optimizer.offload.finish()
    twin, other = copy.deepcopy((model, optimizer))
    assert other.offload is not None
    assert other.offload is not optimizer.offload
    assert train(model, optimizer, 6, first=7) == train(twin, other, 6, first=7)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("mode", MODES)
def test_changes_of_weights_from_outside_reach_the_host(mode: Mode) -> None:
    results = []
    for offload in (None, SLOW):
        model, optimizer = build(mode, offload=offload)
        losses = train(model, optimizer, 6)
        if optimizer.offload is not None:
            optimizer.offload.finish()
        with torch.no_grad():
            for p in filter(torch.is_floating_point, model.parameters()):
                p.mul_(0.9)
        results.append(outcome(model, optimizer, losses + train(model, optimizer, 6, first=6)))
    assert same(*results)


def _state_dict(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


def _after_eval(model: nn.Module) -> dict[str, Tensor]:
    model.eval()
    return dict(model.state_dict())


def _expanded(model: nn.Module) -> dict[str, Tensor]:
    grass.expand(model)
    return dict(model.state_dict())


@pytest.mark.parametrize("read", [_state_dict, _after_eval, _expanded])
@pytest.mark.parametrize("mode", MODES)
def test_weights_read_right_after_a_step_are_stepped(
    mode: Mode, read: Callable[[nn.Module], dict[str, Tensor]]
) -> None:
    if read is _expanded and not mode.startswith("compact"):
        pytest.skip("nothing to expand")
    results = []
    for offload in (None, Offload(_bytes_per_second=2e5)):
        model, optimizer = build(mode, offload=offload)
        train(model, optimizer, 3)
        results.append(copy.deepcopy(read(model)))
    assert same(*results)


def test_zero_grad_cannot_drop_the_sketch_of_a_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may call it at any moment while the device steps: here right before the update reads the sketch."""
    results = []
    for offload in (None, Offload(fraction=1.0)):
        model, optimizer = build("compact", offload=offload, selection="multinomial_norm")
        if offload is not None:
            advance = OptimizerStep.advance

            def interrupted(self: OptimizerStep, *args: Any, advance: Any = advance) -> None:
                for layer in self.layers.values():
                    layer.clear_sketch()
                advance(self, *args)

            monkeypatch.setattr(OptimizerStep, "advance", interrupted)
        results.append(outcome(model, optimizer, train(model, optimizer, 13)))
    assert same(*results)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_scaling_with_a_step_that_overflows(mode: Mode) -> None:
    results = []
    for offload in (None, SLOW):
        model, optimizer = build(mode, offload=offload)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        losses = []
        for step in range(8):
            x = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(1).flatten())
            scaler.scale(loss * (float("inf") if step == 3 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((scaler.get_scale(), *outcome(model, optimizer, losses)))
    assert same(*results)
    assert results[0][0] != 2.0**10
