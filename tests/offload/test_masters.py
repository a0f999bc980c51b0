"""Half-precision parameters with float32 masters on the host: small updates survive, and the rest stays exact."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import grass
from grass import GrassAdamW, Offload
from grass.cpu import masters as kernel
from grass.offload.host_copies import master_of
from tests.offload.training import network, same, train

FLOAT32 = {"rtol": 2e-6, "atol": 1e-6}  # a few roundings of float32, of terms of size 1 that may cancel
NUMBERS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-6}


def drawn(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Master, gradient, weight and moments."""
    g = torch.Generator().manual_seed(seed)
    master, grad, exp_avg, exp_avg_sq = (torch.randn(shape, generator=g) for _ in range(4))
    return [master, grad.bfloat16(), torch.empty_like(grad).bfloat16(), exp_avg, exp_avg_sq.square()]


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 1000), st.sampled_from([1.0, -1.0, 0.25]))
def test_kernel_against_torch(m: int, n: int, step: int, scale: float) -> None:
    tensors = drawn((m, n), seed=m + n)
    expected = nn.Parameter(tensors[0].double())
    expected.grad = tensors[1].double() * scale
    reference = torch.optim.AdamW([expected], **NUMBERS)
    moments = {"exp_avg": tensors[3].double(), "exp_avg_sq": tensors[4].double()}
    reference.state[expected] = {"step": torch.tensor(step - 1.0), **moments}
    reference.step()
    assert kernel.takes(*tensors)
    kernel.step_masters(*tensors, step=float(step), **NUMBERS, scale=scale)
    torch.testing.assert_close(tensors[0].double(), expected.detach(), **FLOAT32)
    torch.testing.assert_close(tensors[3].double(), moments["exp_avg"], **FLOAT32)
    torch.testing.assert_close(tensors[4].double(), moments["exp_avg_sq"], **FLOAT32)
    assert torch.equal(tensors[2], tensors[0].bfloat16())


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, 1.00390625, 1.01171875])
def test_rounds_as_torch(value: float) -> None:
    master, zeros = torch.full((17,), value), torch.zeros(17)
    weight = torch.empty(17, dtype=torch.bfloat16)
    kernel.step_masters(
        master, zeros.bfloat16(), weight, zeros.clone(), zeros.clone(), step=1.0, **{**NUMBERS, "weight_decay": 0.0}
    )
    assert torch.equal(weight, torch.full((17,), value).bfloat16()) or (weight.isnan().all() and value != value)


def test_kernel_takes_only_what_it_can() -> None:
    tensors = drawn((4, 6), 0)
    assert kernel.takes(*tensors)
    assert not kernel.takes(*[t.half() if t.dtype == torch.bfloat16 else t for t in tensors])
    assert not kernel.takes(tensors[0].t().contiguous().t(), *tensors[1:])
    assert not kernel.takes(*tensors[:3], tensors[3].bfloat16(), tensors[4])


def built(offload: Offload | None, mode: str = "full", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    model = network().to(dtype)
    options = {"lr": 1e-2, "update_interval": 4, **options}
    if mode == "full":
        return model, GrassAdamW(model.parameters(), **options, offload=offload)
    return model, GrassAdamW(grass.param_groups(model, rank=4), **options, offload=offload)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["full", "dense"])
def test_equals_a_loop_over_float32_copies(mode: str, dtype: torch.dtype) -> None:
    """Gradients of the rounded weights step float32 copies, by the resident optimizer."""
    model, optimizer = built(Offload(masters=True), mode, dtype, fused=False)
    train(model, optimizer, 9)
    optimizer.offload.finish()
    shadow, resident = built(None, mode, torch.float32, fused=False)
    shadow.load_state_dict(network().to(dtype).float().state_dict())
    rounded = network().to(dtype)
    for step in range(9):
        for group in resident.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        x = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(rounded(x).float().flatten(0, 1), x.roll(1).flatten()).backward()
        nn.utils.clip_grad_norm_(rounded.parameters(), 1.0)
        for p, copied in zip(shadow.parameters(), rounded.parameters(), strict=True):
            p.grad, copied.grad = copied.grad.float(), None
        resident.step()
        with torch.no_grad():
            for p, copied in zip(shadow.parameters(), rounded.parameters(), strict=True):
                copied.copy_(p)
    for p, own in zip(shadow.parameters(), model.parameters(), strict=True):
        assert torch.equal(optimizer.state[own]["master"], p)
        assert torch.equal(own, p.to(dtype))


@pytest.mark.parametrize("mode", ["full", "dense"])
def test_any_schedule_gives_the_same_bits(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grass.offload.host_storage.SMALLEST", 256)
    results = []
    for options in ({}, {"fraction": 0.5}, {"fraction": 1.0}, {"_bytes_per_second": 3e6}, {"path": tmp_path}):
        model, optimizer = built(Offload(masters=True, **options), mode)
        losses = train(model, optimizer, 9)
        results.append((losses, dict(model.state_dict()), optimizer.state_dict()))
    assert all(same(results[0], other) for other in results[1:])


def test_small_updates_survive() -> None:
    moved = []
    for masters in (False, True):
        p = nn.Parameter(torch.ones(257, 256, dtype=torch.bfloat16))  # a small one has a master without offload
        optimizer = GrassAdamW([p], lr=1e-4, offload=Offload(masters=masters))  # an eightieth of bfloat16's spacing
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        optimizer.offload.finish()
        moved.append(1 - p.float().mean().item())
    assert moved[0] == 0
    assert moved[1] == pytest.approx(0.01, abs=2**-9)  # half the spacing below 1


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["full", "dense"])
def test_resume_is_bit_exact(mode: str, fraction: float) -> None:
    offload = Offload(masters=True, fraction=fraction)
    model, optimizer = built(offload, mode)
    train(model, optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = train(model, optimizer, 5, first=5)
    other, resumed = built(offload, mode, lr=3e-2)
    train(other, resumed, 2)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert train(other, resumed, 5, first=5) == losses
    assert same(other.state_dict(), model.state_dict())
    assert same(resumed.state_dict(), optimizer.state_dict())


def test_new_weights_have_new_masters() -> None:
    model, optimizer = built(Offload(masters=True))
    train(model, optimizer, 3)
    optimizer.offload.finish()
    with torch.no_grad():
        model[1].weight.fill_(1.5)
    before = optimizer.state[model[1].weight]["master"].clone()
    train(model, optimizer, 1, first=3)
    optimizer.offload.finish()
    after = optimizer.state[model[1].weight]["master"]
    assert (after - 1.5).abs().max() < 0.02 < (after - before).abs().max()


def test_a_visiting_master_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def noted(parameter: Tensor, *rest: Any) -> Tensor:
        made.append(parameter)
        return master_of(parameter, *rest)

    monkeypatch.setattr("grass.offload.device_step.master_of", noted)
    model, optimizer = built(Offload(masters=True, fraction=1.0))
    train(model, optimizer, 5)
    optimizer.offload.finish()
    assert len(made) == len(list(model.parameters()))
    with torch.no_grad():
        model[1].weight.fill_(1.5)
    train(model, optimizer, 2, first=5)
    optimizer.offload.finish()
    assert len(made) == len(list(model.parameters())) + 1


@pytest.mark.parametrize("mode", ["full", "dense"])
def test_the_resident_optimizer_loads_it_without_masters_and_back(mode: str) -> None:
    model, optimizer = built(Offload(masters=True), mode)
    train(model, optimizer, 3)
    other, resident = built(None, mode)
    other.load_state_dict(model.state_dict())
    resident.load_state_dict(optimizer.state_dict())
    if mode == "full":
        assert all("master" in state for state in resident.state.values())  # small ones have it without offload
    assert all("master" not in state for state in resident.state.values() if "indices" in state)
    train(other, resident, 2)
    optimizer.load_state_dict(resident.state_dict())
    model.load_state_dict(other.state_dict())
    train(model, optimizer, 2)
    optimizer.offload.finish()
    for p in model.parameters():
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == torch.float32
        assert torch.equal(state["master"].bfloat16(), p)


def test_large_ones_without_masters_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grass.state.master.SMALL", 0)
    model, optimizer = built(Offload(masters=True))
    train(model, optimizer, 3)
    other, resident = built(None)
    other.load_state_dict(model.state_dict())
    resident.load_state_dict(optimizer.state_dict())
    assert {p.ndim > 1 for p in other.parameters() if "master" not in resident.state[p]} == {True}
    assert all(
        s["exp_avg"].dtype == (torch.float32 if "master" in s else torch.bfloat16) for s in resident.state.values()
    )
    optimizer.load_state_dict(resident.state_dict())
    train(model, optimizer, 2)
    optimizer.offload.finish()
    assert all("master" in optimizer.state[p] for p in model.parameters())


def test_active_rows_have_none() -> None:
    model = network().to(torch.bfloat16)
    grass.compact(model, rank=4, dtype=torch.float32)
    optimizer = GrassAdamW(model, lr=1e-2, offload=Offload(masters=True))
    train(model, optimizer, 2)
    optimizer.offload.finish()
    assert {p.dtype: "master" in optimizer.state[p] for p in optimizer.state} == {
        torch.float32: False,
        torch.bfloat16: True,
    }
