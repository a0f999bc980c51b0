"""Explored rows, beyond what :mod:`tests.test_optimizer_reference` compares with a slow reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from grass import GrassAdamW
from grass.memory import state_bytes
from grass.selection.exploration import explored_directions
from grass.state.precision import full_moments
from grass.stepping import explored
from tests.reference import gradients_for, run, uneven_gradients

OPTIONS = dict(lr=1e-2, update_interval=3, selection="multinomial_norm", weight_decay=0.0)


def stepped(explored: int | float, dim: int, steps: int = 1, shape: tuple[int, int] = (9, 12), **options) -> tuple:
    """Weights before and after some steps on the same gradients, and the optimizer's state."""
    parameter = Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    before = parameter.detach().clone()
    optimizer = GrassAdamW([parameter], dim=dim, explore=explored, **{**OPTIONS, "rank": 4, **options})
    for gradient in uneven_gradients(shape, steps):
        parameter.grad = gradient.float()
        optimizer.step()
    return before, parameter.detach(), optimizer


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("dim", [0, 1])
def test_chosen_rows_step_as_without_it(dim: int, fused: bool | None) -> None:
    (before, with_it, optimizer), (_, without, _) = (stepped(q, dim, fused=fused) for q in (1.0, 0))
    rows = optimizer.state[optimizer.param_groups[0]["params"][0]]["indices"]
    others = [row for row in range(before.shape[dim]) if row not in rows]
    assert torch.equal(with_it.index_select(dim, rows), without.index_select(dim, rows))
    assert torch.equal(without.movedim(dim, 0)[others], before.movedim(dim, 0)[others])
    moved = (with_it - before).movedim(dim, 0)
    expected = moved[rows].norm(dim=1).mean().expand(len(others))
    torch.testing.assert_close(moved[others].norm(dim=1), expected, rtol=1e-4, atol=0)  # differences of float32 weights


@pytest.mark.parametrize("dim", [0, 1])
def test_full_rank_is_adamw(dim: int) -> None:
    ours = [Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))]
    theirs = copy.deepcopy(ours)
    gradients = gradients_for(ours, 10)
    run(GrassAdamW(ours, rank=6, dim=dim, explore=1.0, update_interval=100, lr=1e-2), ours, gradients)
    run(torch.optim.AdamW(theirs, lr=1e-2), theirs, gradients)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-7)  # float32


def test_no_more_state() -> None:
    (_, _, with_it), (_, _, without) = (stepped(q, 1, 7, state_policy="bank") for q in (1.0, 0))
    assert state_bytes(with_it) == state_bytes(without)


@pytest.mark.parametrize("gradient", [torch.zeros(9, 12), torch.ones(9, 12).tril(-3)], ids=["none", "some rows"])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_without_gradient_stay(dim: int, gradient: Tensor) -> None:
    parameter = Parameter(torch.randn(9, 12))
    before, optimizer = parameter.detach().clone(), GrassAdamW([parameter], rank=3, dim=dim, explore=1.0, **OPTIONS)
    for _ in range(4):
        parameter.grad = gradient.clone()
        optimizer.step()
    still = gradient == 0
    assert torch.equal(parameter.detach()[still], before[still])
    assert parameter.isfinite().all()


@given(power=st.integers(-20, 15))
def test_the_gradients_scale_does_not_matter(power: int) -> None:
    """As for AdamW with ``eps=0``; by powers of two, which round nothing."""
    trained = []
    for scale in (1.0, 2.0**power):
        parameter = Parameter(torch.ones(5, 7))
        optimizer = GrassAdamW([parameter], rank=2, explore=1.0, eps=0.0, **OPTIONS)
        for gradient in uneven_gradients((5, 7), 5):
            parameter.grad = gradient.float() * scale
            optimizer.step()
        trained.append(parameter.detach())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("moment_dtype", ["bfloat16", "8bit"])
def test_moves_by_the_moments_that_are_stored(moment_dtype: str, dim: int) -> None:
    """Explored rows move by the formula, from the codes that the step leaves: to float32's last bits."""
    shape, lr, betas, eps = (64, 48), OPTIONS["lr"], (0.9, 0.999), 1e-8
    (_, before, _), (_, after, optimizer) = (
        stepped(1.0, dim, steps, shape=shape, moment_dtype=moment_dtype) for steps in (5, 6)
    )
    (state,) = optimizer.state.values()
    (*_, gradient), rows, age = uneven_gradients(shape, 6), state["indices"], state["row_steps"].unsqueeze(1 - dim)
    with full_moments(dict(state), moment_dtype, key=0) as moments:
        average, square = (moment.double() for moment in moments)
    direction = average / (1 - betas[0] ** age) / ((square / (1 - betas[1] ** age)).sqrt() + eps)
    others = torch.tensor([row for row in range(shape[dim]) if row not in rows])
    grads = [gradient.float().double().index_select(dim, chosen) for chosen in (rows, others)]
    unit, lengths = explored_directions(direction, *grads, dim, gradient)
    expected = before.double().index_select(dim, others) - lr * unit * lengths.unsqueeze(1 - dim)
    torch.testing.assert_close(after.index_select(dim, others).double(), expected, rtol=1e-6, atol=1e-6)


# bfloat16 rounds the first moment and the root of the second to 2^-9 and 2^-10. In 8 bits a value a hundredth of its
# block's largest is rounded to 28% of itself: in a block of such uneven columns that is the rule.
@pytest.mark.parametrize(("moment_dtype", "error"), [("bfloat16", 2**-8), ("8bit", 0.3)])
def test_narrow_moments(moment_dtype: str, error: float) -> None:
    """Exploring leaves moments as they are stored, and moves much as in float32."""
    (before, exact, _), (_, narrow, _) = (
        stepped(1.0, 1, 6, shape=(64, 48), moment_dtype=d) for d in ("float32", moment_dtype)
    )
    moved = exact - before
    assert (narrow - exact).norm() < error * moved.norm()
    with_it, without = (stepped(q, 1, 1, moment_dtype=moment_dtype)[2] for q in (1.0, 0))
    for ours, theirs in zip(with_it.state.values(), without.state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours if isinstance(ours[key], Tensor))


def test_stochastic_rounding_keeps_small_updates() -> None:
    """Steps of a tenth of the spacing of bfloat16 move the rows that were not chosen as far as in float32."""
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        parameter = Parameter(torch.ones(64, 64, dtype=dtype))
        optimizer = GrassAdamW([parameter], rank=4, explore=1.0, stochastic_rounding=True, **{**OPTIONS, "lr": 4e-4})
        for _ in range(40):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved.append(1 - parameter.detach().float().mean())
    torch.testing.assert_close(moved[1], moved[0], rtol=0.05, atol=0)  # the mean of 4,096 entries and 40 draws


def test_channels_last_weights() -> None:
    weights = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        generator = torch.Generator().manual_seed(0)
        parameter = Parameter(torch.randn(6, 3, 2, 2, generator=generator).to(memory_format=memory_format))
        optimizer = GrassAdamW([parameter], rank=2, explore=1.0, **OPTIONS)
        for gradient in uneven_gradients((6, 3, 2, 2), 4):
            parameter.grad = gradient.float().to(memory_format=memory_format)
            optimizer.step()
        weights.append(parameter.detach().contiguous())
    torch.testing.assert_close(*weights)


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(ValueError, match=r"explore=1\.0 takes replacement=False"):
        GrassAdamW([Parameter(torch.ones(4, 4))], rank=2, explore=1.0, replacement=True, selection="uniform")
    with pytest.raises(ValueError, match="Invalid explore=-2: must be an integer >= 0, a fraction"):
        GrassAdamW([Parameter(torch.ones(4, 4))], rank=2, explore=-2)


SHAPES = [(9, 12), (31, 7), (1, 5), (64, 257), (300, 257), (257, 300)]
"""Of weights in one call of the kernel; it shares the last two out over its threads."""


@pytest.fixture(params=[1, 3])
def threads(request) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def many_stepped(fused: bool, layout: str, **options) -> list[Tensor]:
    weights = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
    if layout == "column-major":
        weights = [weight.t().contiguous().t() for weight in weights]
    parameters = [Parameter(weight) for weight in weights]
    optimizer = GrassAdamW(parameters, rank=0.3, explore=1.0, fused=fused, **{**OPTIONS, **options})
    for gradients in zip(*(uneven_gradients(shape, 7) for shape in SHAPES), strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("policy", ["reset", "bank"])
@pytest.mark.parametrize("layout", ["row-major", "column-major"])
@pytest.mark.parametrize("dim", [0, 1])
def test_compiled_equals_operators(dim: int, layout: str, policy: str, threads: int, monkeypatch) -> None:
    options = {"dim": dim, "state_policy": policy, "maximize": dim == 1, "weight_decay": 0.1}
    theirs = many_stepped(False, layout, **options)
    monkeypatch.setattr(explored, "_step_alike", None)  # not called
    ours, again = (many_stepped(True, layout, **options) for _ in range(2))
    for our, same, their in zip(ours, again, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)  # float32 sums in another order
        assert torch.equal(our, same)


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("explore", [2, 1.0], ids=["two", "all"])
def test_decay_of_every_row_is_adamws_on_average(explore: int | float, dim: int, fused: bool | None) -> None:
    """Without gradients rows only decay: explored ones as much more as they are explored less often."""
    size, rank, lr, decay, steps = 10, 4, 1e-2, 0.1, 400
    weight = Parameter(torch.ones(*((size, 3) if dim == 0 else (3, size)), dtype=torch.float32))
    options = {"update_interval": 50, "selection": "uniform", "weight_decay": decay, "lr": lr, "eps": 1e-8}
    optimizer = GrassAdamW([weight], rank=rank, dim=dim, explore=explore, fused=fused, **options)
    seen = weight.detach().clone()
    factors = {1.0, 1 - lr * decay, 1 - lr * decay * (size - rank) / 2} if explore == 2 else {1 - lr * decay}
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        quotients = (weight.detach() / seen).movedim(dim, 0)[:, 0]
        assert all(min(abs(q - f) for f in factors) < 1e-6 for q in quotients.tolist())  # float32
        seen = weight.detach().clone()
    expected = (1 - lr * decay) ** steps
    assert float(seen.log().mean().exp()) == pytest.approx(expected, rel=0.01)  # draws, the squares of the factors
