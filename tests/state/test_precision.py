"""Moments in less than float32, and stochastic rounding of weights."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import grass
from grass import GrassAdamW
from grass.kernels import make_key, random_bits
from grass.kernels.moment_codes import BLOCK, dynamic_map, encode_moment
from grass.memory import state_bytes
from grass.state.precision import full_moments

NARROW = ["bfloat16", "8bit"]


def trained(steps: int = 12, dtype: torch.dtype = torch.float32, compact: bool = False, **options) -> tuple:
    """A model and its optimizer after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 24)).to(dtype)
    if compact:
        grass.compact(model, rank=0.5, explore=0)
        optimizer = GrassAdamW(model, lr=3e-3, update_interval=5, **options)
    else:
        optimizer = GrassAdamW(
            grass.param_groups(model, rank=0.5, targets="all-linear"), lr=3e-3, update_interval=5, **options
        )
    advance(model, optimizer, range(steps))
    return model, optimizer


def advance(model: nn.Module, optimizer: GrassAdamW, steps: range) -> float:
    dtype, loss = next(model.parameters()).dtype, torch.zeros(())
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        loss = (model(x.to(dtype)).float() - x[:, :24].roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("policy", ["reset", "keep", "bank"])
@pytest.mark.parametrize("compact", [False, True], ids=["dense", "compact"])
@pytest.mark.parametrize("precision", NARROW)
def test_trains_as_float32_does(precision, compact, policy) -> None:
    losses = []
    for moment_dtype in ("float32", precision):
        model, optimizer = trained(0, compact=compact, state_policy=policy, moment_dtype=moment_dtype)
        losses.append(advance(model, optimizer, range(80)))
    assert losses[0] < 0.9
    assert abs(losses[1] - losses[0]) < 0.05 * losses[0]


@pytest.mark.parametrize(
    "options",
    [
        {"moment_dtype": "8bit", "state_policy": "bank"},
        {"moment_dtype": torch.bfloat16, "state_policy": "keep"},
        {"stochastic_rounding": True},
        {"stochastic_rounding": True, "decay": "all", "moment_dtype": "8bit"},
    ],
    ids=str,
)
@pytest.mark.parametrize("compact", [False, True], ids=["dense", "compact"])
def test_resumes_bit_for_bit(options, compact) -> None:
    dtype = torch.bfloat16 if "stochastic_rounding" in options else torch.float32
    model, optimizer = trained(7, dtype, compact, **options)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other, resumed = trained(0, dtype, compact, **options)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for m, o in ((model, optimizer), (other, resumed)):
        advance(m, o, range(7, 19))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(("precision", "each"), [("float32", 8), ("bfloat16", 4), ("8bit", 2 + 8 / BLOCK)])
def test_state_bytes(precision, each) -> None:
    p = Parameter(torch.randn(64, 128))
    p.grad = torch.randn_like(p)
    optimizer = GrassAdamW([p], rank=16, dim=0, moment_dtype=precision, state_policy="reset")
    optimizer.step()
    assert state_bytes(optimizer).device == 16 * 128 * each + 16 * 8


@pytest.mark.parametrize("compact", [False, True], ids=["dense", "compact"])
def test_stochastic_rounding_reaches_every_half_precision_weight(compact) -> None:
    """At a learning rate far below the spacing of bfloat16 nothing moves without it; every weight does with it."""
    for stochastic in (False, True):
        model, optimizer = trained(
            0, torch.bfloat16, compact, stochastic_rounding=stochastic, selection="uniform", weight_decay=0.0
        )
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        for layer in (model[0], model[2]):
            if compact:
                layer.reload()
        for group in optimizer.param_groups:
            group["lr"] = 2e-4
        before = copy.deepcopy(model.state_dict())
        advance(model, optimizer, range(30))
        now = {name: value for name, value in model.state_dict().items() if "bias" not in name}  # biases have masters
        assert [not torch.equal(before[name], value) for name, value in now.items()] == [stochastic] * len(now)


def test_decay_of_whole_weights_is_rounded_stochastically() -> None:
    p = Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = GrassAdamW([p], lr=1e-3, weight_decay=0.1, rank=1, dim=0, decay="all", stochastic_rounding=True)
    for _ in range(100):
        p.grad = torch.zeros_like(p)
        p.grad[0] = 1e-3
        optimizer.step()
    assert abs(p[1:].float().mean().item() - (1 - 1e-4) ** 100) < 5e-4


def test_runs_differ_by_seed_alone() -> None:
    weights = [trained(6, torch.bfloat16, stochastic_rounding=True, seed=seed)[0][0].weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [1, 255, 256, 1000])
def test_codes_are_neighbours_and_right_in_the_mean(size, signed) -> None:
    x = torch.randn(size) * torch.logspace(-6, 2, size)
    x = x if signed else x.abs()
    levels, decoded = dynamic_map(signed), []
    for draw in range(400):
        codes, scale = encode_moment(x, signed, random_bits(torch.arange(size), make_key(draw)))
        assert codes.dtype == torch.uint8
        assert scale.shape == (-(-size // BLOCK),)
        decoded.append(levels[codes.int()].double() * scale.repeat_interleave(BLOCK)[:size])
    draws = torch.stack(decoded)
    low, high = draws.min(0).values, draws.max(0).values
    spread = (high - low).clamp(min=1e-12)
    between = high > low
    assert between.any() == (size > 1)
    assert not between.any() or ((draws.mean(0) - x).abs() / spread)[between].mean() < 0.05  # 0.02 expected
    exact = x.abs() == x.abs().max()
    assert torch.equal(draws[0][exact].float(), x[exact])


def test_levels() -> None:
    for signed, count in ((True, 255), (False, 256)):
        levels = dynamic_map(signed)
        assert len(levels) == count
        assert levels.diff().gt(0).all()
        assert 0.0 in levels
        assert levels[-1] == 1.0
    assert torch.equal(dynamic_map(True), -dynamic_map(True).flip(0))
    assert (dynamic_map(False) > 0.1).sum() > 127


def test_zero_moments_stay_zero() -> None:
    state = {"exp_avg": torch.zeros(3, 5), "exp_avg_sq": torch.zeros(3, 5)}
    with full_moments(state, "8bit", 1):
        pass
    with full_moments(state, "8bit", 2) as moments:
        assert not any(m.any() for m in moments)


def test_float64_moments_stay() -> None:
    p = Parameter(torch.randn(8, 8, dtype=torch.float64))
    p.grad = torch.randn_like(p)
    optimizer = GrassAdamW([p], rank=4, moment_dtype="8bit")
    optimizer.step()
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float64


def test_wrong_values() -> None:
    p = Parameter(torch.randn(8, 8))
    with pytest.raises(ValueError, match=r"moment_dtype='float16'.*'8bit'"):
        GrassAdamW([p], moment_dtype=torch.float16)
    with pytest.raises(ValueError, match="replacement=False"):
        GrassAdamW([p], rank=2, replacement=True, selection="uniform", stochastic_rounding=True)


@pytest.mark.parametrize("compact", [False, True], ids=["dense", "compact"])
@pytest.mark.parametrize("precision", NARROW)
def test_second_moments_decay(precision, compact) -> None:
    """By a thousandth a step, a quarter of bfloat16's spacing: rounded to the nearest they would stay."""
    model, optimizer = trained(20, compact=compact, moment_dtype=precision, state_policy="keep", selection="top_r")
    for group in optimizer.param_groups:
        group.update(lr=0.0, update_interval=10**6)
    state = next(s for s in optimizer.state.values() if "indices" in s)

    def second() -> torch.Tensor:
        copied = dict(state)
        with full_moments(copied, precision, 1) as moments:
            return moments[1].clone()

    before = second().mean()
    for _ in range(200):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        optimizer.step()
    torch.testing.assert_close(second().mean() / before, torch.tensor(0.999**200), rtol=0.02, atol=0)
