"""The stand-in accelerator itself: right where code is right, wrong where a wait is missing."""

import copy
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.accelerator import standin

standin.install()
DEVICE = torch.device("standin:0")
OTHER = torch.device("standin:1")
SEEDS = range(40)
SIZE = 300


@pytest.fixture(autouse=True)
def order():
    standin.seed_order(0)
    yield
    assert not standin.end()


def wrong(run):
    """How many seeds give something else than ones."""
    count = 0
    for seed in SEEDS:
        standin.seed_order(seed)
        count += not torch.equal(run().cpu(), torch.ones(SIZE))
        torch.accelerator.synchronize()
    return count


def ones_slowly():
    """Ones, by several operators of the current stream."""
    out = torch.zeros(SIZE, device=DEVICE)
    for _ in range(10):
        out += 0.5
    return out - 4


def test_torch_finds_it():
    assert torch.accelerator.current_accelerator() == torch.device("standin")
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module(DEVICE) is torch.standin


def test_a_model_trains_as_on_the_cpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 24), nn.Linear(24, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
    tokens, there = torch.randint(16, (4, 8)), copy.deepcopy(model).to(DEVICE)
    for own, ids in ((model, tokens), (there, tokens.to(DEVICE))):
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.01, foreach=False)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(own(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), there.parameters(), strict=True):
        assert theirs.device == DEVICE
        assert torch.equal(mine, theirs.cpu())


def test_operators_that_tell_the_host_something():
    values = torch.tensor([0.0, 3.0, 0.0, 5.0], device=DEVICE)
    assert values.nonzero().flatten().tolist() == [1, 3]
    assert values.max().item() == 5
    assert torch.equal(values, values.clone())
    assert values.unique().tolist() == [0, 3, 5]


def test_views_share_memory():
    base = torch.arange(12.0, device=DEVICE)
    base.view(3, 4).t()[1] += 100
    assert base.tolist() == [0, 101, 2, 3, 4, 105, 6, 7, 8, 109, 10, 11]


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_event_gives_wrong_numbers(waits):
    def run():
        side = torch.Stream(DEVICE)
        made = ones_slowly()
        ready = torch.accelerator.current_stream().record_event()
        with side:
            if waits:
                side.wait_event(ready)
            out = made.clone()
        torch.accelerator.current_stream().wait_stream(side)
        made.record_stream(side)
        return out

    assert wrong(run) == 0 if waits else wrong(run) > 10


@pytest.mark.parametrize("records", [True, False])
def test_a_missing_record_stream_gives_wrong_numbers(records):
    def run():
        side = torch.Stream(DEVICE)
        made = ones_slowly()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            out = torch.zeros(SIZE, device=DEVICE)
            out += made
        if records:
            made.record_stream(side)
        del made
        torch.full((SIZE,), 7.0, device=DEVICE)
        torch.accelerator.current_stream().wait_stream(side)
        out.record_stream(torch.accelerator.current_stream())
        return out

    assert wrong(run) == 0 if records else wrong(run) > 10


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_read_late(waits):
    def run():
        host = torch.ones(SIZE).pin_memory()
        out = host.to(DEVICE, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().synchronize()
        host.fill_(3)
        return out

    assert wrong(run) == 0 if waits else wrong(run) > 10


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_written_late(waits):
    def run():
        host = torch.empty(SIZE, pin_memory=True)
        host.copy_(ones_slowly(), non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        if waits:
            event.synchronize()
        return host.clone()

    assert wrong(run) == 0 if waits else wrong(run) > 10


def test_pageable_memory_is_read_at_once():
    def run():
        host = torch.ones(SIZE)
        out = host.to(DEVICE, non_blocking=True)
        host.fill_(3)
        return out

    assert wrong(run) == 0


def test_freed_pinned_memory_waits_for_its_copies():
    def run():
        out = torch.ones(SIZE).pin_memory().to(DEVICE, non_blocking=True)
        torch.empty(SIZE, pin_memory=True).fill_(3)
        return out

    assert wrong(run) == 0


def test_pinned_memory_is_counted():
    before = standin.pinned_bytes()
    held = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert held[5:].is_pinned()
    assert not torch.empty(8).is_pinned()
    assert standin.pinned_bytes() == before + (1 << 20)
    del held
    assert standin.pinned_bytes() == before


def test_new_memory_is_poison():
    assert torch.empty(SIZE, device=DEVICE).isnan().all()


def test_memory_is_counted_and_bounded():
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    made = [torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(3)]
    del made[1:]
    assert torch.accelerator.memory_allocated() == before + (1 << 20)
    assert torch.accelerator.max_memory_allocated() == before + (3 << 20)
    with standin.budget(before + (3 << 20)):
        made += [torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        with pytest.raises(torch.OutOfMemoryError, match="standin out of memory"):
            torch.empty(1, device=DEVICE)


def test_the_host_cannot_touch_device_memory():
    code = (
        "import ctypes, torch; from tests.accelerator import standin; standin.install();"
        "ctypes.string_at(torch.ones(4, device='standin').data_ptr(), 4)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGSEGV


def test_an_operator_that_fails_is_reported_later():
    torch.zeros(3, device=DEVICE).index_select(0, torch.tensor([7], device=DEVICE))
    with pytest.raises(RuntimeError, match="an operator failed on the device"):
        torch.accelerator.synchronize()
    assert "out of range" in standin.take_fault()


def test_tensors_of_the_host_are_refused():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)


def test_devices_are_apart():
    there = torch.ones(3, device=OTHER)
    assert there.to(DEVICE).sum().item() == 3
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        there + torch.ones(3, device=DEVICE)


def test_random_numbers_do_not_depend_on_the_order():
    def draw(seed):
        standin.seed_order(seed)
        torch.manual_seed(3)
        side = torch.Stream(DEVICE)
        first = torch.randn(5, device=DEVICE)
        with side:
            second = torch.rand(5, device=DEVICE)
        torch.accelerator.synchronize()
        return torch.cat([first, second, torch.randperm(5, device=DEVICE).float()]).tolist()

    assert draw(1) == draw(2) == draw(3)


def test_inference_mode():
    with torch.inference_mode():
        there = torch.ones(3).to(DEVICE) + torch.arange(3, device=DEVICE)
        there.mul_(2)
        assert there.tolist() == [2, 4, 6]


@pytest.mark.parametrize("draw", [lambda t: t.normal_(), nn.functional.dropout])
def test_random_numbers_of_the_device_and_of_the_host_are_apart(draw):
    """The host's generator stays as it is while a long operator draws, and the operator does not read it."""
    there = torch.ones(1 << 23, device=DEVICE)
    torch.accelerator.synchronize()
    drawn = draw(there)
    before, seen = torch.get_rng_state(), []
    waiting = threading.Thread(target=torch.accelerator.synchronize)
    waiting.start()
    while waiting.is_alive():
        seen.append(torch.get_rng_state())
    waiting.join()
    assert drawn.sum().isfinite()
    assert all(torch.equal(state, before) for state in seen)


def test_a_checkpoint_draws_the_same_dropout_again():
    torch.manual_seed(0)
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    y = checkpoint(lambda t: nn.functional.dropout(t) * t, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y.detach())
    assert 0 < int((y == 0).sum()) < 64
