"""Steps: equal to AdamW without a rank, downhill with one, whatever way the optimizer is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from grass import GrassAdamW
from tests.torch_suite.cases import (
    RANKS,
    Build,
    assert_equal,
    both,
    harmless,
    parameters,
    regression,
    set_gradients,
    take_steps,
    values,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@harmless
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_rank_it_is_adamw(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    take_steps(GrassAdamW(ours, **options), ours, range(6))
    take_steps(torch.optim.AdamW(theirs, **options), theirs, range(6))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


@both
@harmless
def test_implementations_agree(build: Build, options: dict[str, Any]) -> None:
    """``foreach`` and ``fused`` choose the implementation, never the result."""
    results = []
    for choice in ({"fused": False, "foreach": False}, {"foreach": True, "fused": None}, {"fused": None}):
        held = parameters()
        take_steps(build(held, **{**options, **choice}), held, range(6))
        results.append(held)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # float32, six steps


@both
@harmless
def test_the_loss_falls(build: Build, options: dict[str, Any]) -> None:
    layer, loss = regression()
    optimizer = build(layer.parameters(), **{**options, "lr": 0.01})
    first = loss().item()
    for _ in range(60):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert (loss().item() > first) if options.get("maximize") else (loss().item() < first / 2)


@both
def test_maximize_is_the_negative_gradient(build: Build) -> None:
    up, down = parameters(), parameters()
    ascent, descent = build(up, maximize=True), build(down)
    for seed in range(6):
        set_gradients(up, seed)
        before = [p.grad.clone() for p in up]
        ascent.step()
        assert_equal([p.grad for p in up], before)
        set_gradients(down, seed)
        for p in down:
            p.grad.neg_()
        descent.step()
    for a, b in zip(up, down, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@both
def test_a_closure_is_called_once_with_gradients_enabled(build: Build) -> None:
    layer, loss = regression()
    optimizer, seen = build(layer.parameters(), lr=0.01), []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        seen.append(value.item())
        return value

    with torch.no_grad():
        returned = [optimizer.step(closure).item() for _ in range(8)]
    assert returned == seen
    assert seen[-1] < seen[0]
    assert optimizer.step() is None


@both
def test_a_step_leaves_the_grad_mode_alone(build: Build) -> None:
    held = parameters()
    optimizer = build(held)
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            take_steps(optimizer, held, [1])
            assert torch.is_grad_enabled() is mode
    assert all(p.requires_grad and p.grad_fn is None for p in held)


@both
def test_no_gradients(build: Build) -> None:
    """Nothing moves, nothing is remembered; a parameter without one waits while the others go on."""
    held = parameters()
    before, optimizer = values(held), build(held, weight_decay=0.5)
    optimizer.step()
    assert_equal(held, before)
    assert not any(optimizer.state.values())
    set_gradients(held[1:], 1)
    optimizer.step()
    assert torch.equal(held[0], before[0])
    assert not optimizer.state.get(held[0])
    assert not torch.equal(held[1], before[1])


@both
def test_zero_gradients(build: Build) -> None:
    """Without decay nothing moves; decay alone still acts on what the optimizer updates at full rank."""
    for decay in (0.0, 0.5):
        held = parameters()
        before, optimizer = values(held), build(held, lr=0.1, weight_decay=decay)
        for p in held:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(held[2].detach(), before[2] * (1 - 0.1 * decay))
        if not decay:
            assert_equal(held, before)


@both
def test_lr_of_zero_moves_nothing(build: Build) -> None:
    for lr in (0.0, torch.tensor(0.0)):
        held = parameters()
        before = values(held)
        take_steps(build(held, lr=lr, weight_decay=0.5), held, range(5))
        assert_equal(held, before)


@both
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-dim", "one element"])
def test_a_tensor_lr_is_followed(build: Build, shape: tuple[int, ...]) -> None:
    plain, tensor = parameters(), parameters()
    lr = torch.full(shape, 0.01)
    first, second = build(plain, lr=0.01), build(tensor, lr=lr)
    take_steps(first, plain, range(4))
    take_steps(second, tensor, range(4))
    lr.fill_(0.002)
    first.param_groups[0]["lr"] = 0.002
    take_steps(first, plain, range(4, 8))
    take_steps(second, tensor, range(4, 8))
    assert second.param_groups[0]["lr"] is lr
    for a, b in zip(plain, tensor, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # lr is rounded to float32


@both
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_schedulers(build: Build, lr: float | torch.Tensor) -> None:
    """A constant schedule changes nothing; a decaying one takes the learning rate along."""
    held, control = parameters(), parameters()
    optimizer = build(held, lr=lr.clone() if isinstance(lr, torch.Tensor) else lr)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for seed in range(4):
        take_steps(optimizer, held, [seed])
        constant.step()
    take_steps(build(control, lr=lr), control, range(4))
    assert_equal(held, control)
    halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    take_steps(optimizer, held, [4])
    halving.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.005)


@both
def test_groups_have_learning_rates_of_their_own(build: Build) -> None:
    layer, loss = regression()
    before = values(layer.parameters())
    optimizer = build([{"params": [layer.weight], "lr": 0.0}, {"params": [layer.bias]}], lr=0.01)
    loss().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before[0])
    assert not torch.equal(layer.bias, before[1])


def test_half_of_the_columns_hold_state() -> None:
    held = parameters()
    optimizer = GrassAdamW(held, **RANKS["half"])
    take_steps(optimizer, held, [1])
    shapes = [tuple(optimizer.state[p]["exp_avg"].shape) for p in held]
    assert shapes == [(6, 2), (4, 6), (5,), (), (0, 4)]


@both
def test_zero_grad(build: Build) -> None:
    held = parameters()
    optimizer = build(held)
    set_gradients(held, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in held)
    optimizer.zero_grad()
    assert all(p.grad is None for p in held)


@both
def test_gradient_of_another_grad_fn(build: Build) -> None:
    """A gradient that autograd recorded, ``create_graph=True``, is used as it is and stays in its graph."""
    p = nn.Parameter(torch.ones(4, 4))
    (p.grad,) = torch.autograd.grad((p**3).sum(), [p], create_graph=True)
    build([p]).step()
    assert p.grad.requires_grad
    assert p.is_leaf


@both
def test_dtypes_side_by_side(build: Build) -> None:
    """Parameters of several precisions in one group are stepped as each would be in its own."""
    together = [p for dtype in DTYPES for p in parameters(dtype)]
    take_steps(build(together, seed=5), together, range(2))
    for number, dtype in enumerate(DTYPES):
        alone = parameters(dtype)
        take_steps(build(alone, rank=None), alone, range(2))
        for p, q in zip(together[5 * number + 2 :], alone[2:], strict=False):  # those without rows to select
            torch.testing.assert_close(p, q)


DEFAULTS = {
    "plain": {"rank": None},
    "bank": {},
    "bank, by operators": {"fused": False},
    "keep": {"state_policy": "keep"},
    "reset, by operators": {"state_policy": "reset", "fused": False},
    "with replacement": {"replacement": True},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", DEFAULTS.values(), ids=DEFAULTS)
def test_the_default_dtype_does_not_matter(options: dict[str, Any], dtype: torch.dtype) -> None:
    usual, other = parameters(), parameters()
    take_steps(GrassAdamW(usual, **{**RANKS["half"], **options}), usual, range(5))
    torch.set_default_dtype(dtype)
    try:
        take_steps(GrassAdamW(other, **{**RANKS["half"], **options}), other, range(5))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(other, usual)


@both
def test_the_state_is_not_recorded(build: Build) -> None:
    """No tensor of the state requires a gradient."""
    held = parameters()
    optimizer = build(held)
    take_steps(optimizer, held, range(3))
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert tensors
    assert not any(t.requires_grad for t in tensors)
