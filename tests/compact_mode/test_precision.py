"""Mixed precision: autocast, gradient scaling, fp32 rows above half-precision weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import grass
from grass import GrassAdamW
from tests.compact_mode.networks import (
    DIMS,
    Network,
    assert_same_weights,
    batches,
    compact_layers,
    converted,
    loss_of,
    selections,
    train,
)
from tests.reference import relative_difference
from tests.reference import train as train_llama

HALF = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")]


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("dim", DIMS)
def test_autocast(dim: int, half: torch.dtype) -> None:
    """The loss is the plain model's to the bit; gradients are half-precision products in fp32."""
    model, plain, batch = Network(), Network(), batches(1)[0]
    grass.compact(model, rank=3, explore=0, dim=dim)
    with torch.autocast("cpu", half):
        loss, expected = loss_of(model, batch), loss_of(plain, batch)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for name, layer in compact_layers(model).items():
        full = plain.get_submodule(name).weight.grad
        assert layer.active.grad.dtype == torch.float32
        assert layer.weight.dtype == torch.float32
        # Both are the same products; they may differ in the last place of the half precision.
        assert relative_difference(layer.active.grad, full.index_select(dim, layer.selected)) < torch.finfo(half).eps
    assert relative_difference(model.up.bias.grad, plain.up.bias.grad) < torch.finfo(half).eps


def test_autocast_inside_and_without_gradients() -> None:
    """A region in which autocast is off, half-precision inputs within it, and evaluation."""
    model, plain = Network(), Network()
    grass.compact(model, rank=3, explore=0)
    x = torch.randn(5, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.up(x).dtype == model.up(x.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(model.up(x.bfloat16()), plain.up(x.bfloat16()))
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(model.up(x), plain.up(x))
            assert model.up(x).dtype == torch.float32
        with torch.no_grad():
            assert torch.equal(model.up(x), plain.up(x))


@pytest.mark.parametrize("dim", DIMS)
def test_training_under_autocast(tiny_llama, token_batches, dim: int) -> None:
    model = tiny_llama()
    grass.compact(model, rank=0.25, explore=0, dim=dim)
    optimizer = GrassAdamW(model, lr=1e-2, update_interval=5, state_policy="bank")
    first = selections(model)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    losses = train_llama(model, optimizer, token_batches)
    assert losses[-1] < 0.6 * losses[0]
    assert selections(model) != first
    assert all(p.dtype == torch.float32 for p in model.parameters())


def scaled_steps(model: nn.Module, optimizer: GrassAdamW, scaler: torch.amp.GradScaler, data: list) -> None:
    """The documented loop with unscaling and clipping."""
    for batch in data:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def test_grad_scaler() -> None:
    """A scale that is a power of two changes no bit, selections included."""
    runs = []
    for enabled in (True, False):
        model, optimizer = converted()
        scaled_steps(model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled), batches(10))
        runs.append(model)
    assert_same_weights(*runs)


@pytest.mark.parametrize("at", [1, 3], ids=["ordinary step", "step that gathers the sketch"])
def test_a_skipped_step(at: int) -> None:
    """The loss overflows once: nothing moves, the scale is halved, and the next refresh is about finite gradients."""
    model, optimizer = converted()
    scaler, data = torch.amp.GradScaler("cpu", init_scale=2.0**10), batches(12)
    scaled_steps(model, optimizer, scaler, data[:at])
    before, first = copy.deepcopy(model), selections(model)
    scaled_steps(model, optimizer, scaler, [(data[0][0], data[0][1] * torch.inf)])
    assert_same_weights(model, before)
    assert scaler.get_scale() == 2.0**9
    assert optimizer.state[model.up.active]["step"] == at
    scaled_steps(model, optimizer, scaler, data[at:])
    assert all(rows != old for rows, old in zip(selections(model), first, strict=True)), "refreshes go on"
    assert all(p.isfinite().all() for p in model.parameters())


def test_fine_rows_keep_updates_that_bf16_loses() -> None:
    """Near 1 bf16 has steps of 2^-7: an update of 1e-4 is lost forty times over, or kept and seen in the end."""
    moved = {}
    for active in (torch.bfloat16, torch.float32):
        layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(layer.weight)
        grass.compact(layer, rank=4, explore=0, dtype=active)
        # Rows chosen again, whether in the same order or not, keep the part that the weight cannot hold.
        optimizer = GrassAdamW(layer, lr=1e-4, weight_decay=0.0, update_interval=5, state_policy="keep")
        for _ in range(100):
            layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        moved[active] = 1 - layer.weight.float()
        assert torch.equal(layer.active.bfloat16(), layer.weight.index_select(1, layer.selected))
    assert not moved[torch.bfloat16].any()
    torch.testing.assert_close(moved[torch.float32], torch.full((4, 4), 3 * 2**-8))  # what 0.01 is on the grid below 1


def test_a_weight_changed_by_hand_rounds_no_other_value() -> None:
    """As by a mask after each step: where the weight is not changed, active rows stay more precise than it."""
    free, masked = (nn.Linear(8, 8, bias=False, dtype=torch.bfloat16) for _ in range(2))
    nn.init.ones_(free.weight)
    mask = torch.ones(8, 8).fill_diagonal_(0)
    with torch.no_grad():
        masked.weight.copy_(mask)
    for layer in (free, masked):
        grass.compact(layer, rank=4, explore=0, dtype=torch.float32)
        optimizer = GrassAdamW(layer, lr=1e-4, weight_decay=0.0)
        for _ in range(40):
            layer(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if layer is masked:
                with torch.no_grad():
                    layer.weight.mul_(mask)
    masked(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()  # takes up the last change
    assert (free.active < 0.998).all()
    assert torch.equal(masked.active, free.active * mask[:, masked.selected])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    """Step counts, sketches and norms are float32 whatever type new tensors have."""
    models, data = [], batches(5)
    for default in (torch.float32, dtype):
        model = Network()
        torch.set_default_dtype(default)
        try:
            grass.compact(model, rank=3)
            train(model, GrassAdamW(model, lr=1e-2, update_interval=2), data)
        finally:
            torch.set_default_dtype(torch.float32)
        models.append(model)
    assert_same_weights(*models)


def test_autocast_leaves_float64_alone() -> None:
    """As torch's own layers, in training and in evaluations."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).double(), torch.randn(3, 8).double()
    plain = model(x)
    grass.compact(model, rank=2, targets="all-linear")
    with torch.autocast("cpu", torch.bfloat16):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(model(x), plain, rtol=1e-12, atol=1e-12)
