"""The link: exact copies and byte counts, a rate that is never exceeded, pinned rings without races, clear errors."""

from __future__ import annotations

import copy
import pickle
import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grass.machine import link as module
from grass.machine import pinned_buffers
from grass.machine.link import Link

PIECE = module.PIECE
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


@pytest.mark.parametrize("rate", [None, 1e12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 13), (1, 5), (2, 3, 4), (PIECE // 2 + 1,)], ids=str)
def test_copies_and_counts(shape, dtype, rate):
    link = Link("cpu", rate)
    source = values(shape, dtype)
    for copies, out in enumerate([torch.zeros_like(source), torch.zeros_like(source)], 1):
        link.down(source, out)
        assert torch.equal(out, source)
        assert (link.bytes_down, link.bytes_up) == (copies * source.nbytes, 0)
    out.zero_()
    link.up(source, out, link.mark())
    assert torch.equal(out, source)
    assert (link.bytes_down, link.bytes_up) == (2 * source.nbytes, source.nbytes)


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.permute(2, 0, 1), lambda t: t.transpose(0, 2)])
def test_layouts(layout):
    source, out = layout(torch.randn(3, 4, 5)), layout(torch.zeros(3, 4, 5))
    Link("cpu").down(source, out)
    assert torch.equal(out, source)


def test_parameters():
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    Link("cpu").up(torch.ones(3, 4), weight)
    assert weight.sum() == 12


@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("size", [1, 1000, PIECE - 1, PIECE, 3 * PIECE + 5])
def test_rate_is_not_exceeded(size, direction):
    """However many copies there are, and though some sleeps end late."""
    link = Link("cpu", 400e6)
    copies = max(1, min(300, 8 * PIECE // size))
    source, out = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    start = time.perf_counter()
    for _ in range(copies):
        getattr(link, direction)(source, out)
    assert time.perf_counter() - start >= 0.999 * copies * size / 400e6


class Clock:
    """Time that passes with sleeps, each late by ``late`` seconds, and copies, each ``copying`` seconds a look."""

    def __init__(self, late: float, copying: float) -> None:
        self.now, self.late, self.copying, self.slept = 100.0, late, copying, 0.0

    def perf_counter(self) -> float:
        self.now += self.copying
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late
        self.slept += seconds + self.late


@pytest.mark.parametrize("size", [100, 10_000, PIECE, 5 * PIECE])
@pytest.mark.parametrize("late", [0.0, 1e-4, 1e-3])
def test_late_sleeps_are_made_up_for(size, late, monkeypatch):
    clock = Clock(late, 1e-9)
    monkeypatch.setattr(module, "time", clock)
    link, copies, start = Link("cpu", 1e9), min(2000, 100 * PIECE // size), clock.now
    buffer = torch.zeros(size, dtype=torch.uint8)
    for _ in range(copies):
        link.down(buffer, buffer.clone())
    wanted = copies * size / 1e9
    assert wanted <= clock.now - start + 1e-9
    assert clock.now - start <= wanted + late + 1e-5 * copies
    assert clock.slept >= wanted - 1e-5 * copies  # the time passed asleep, not in a loop


def test_rest_earns_no_credit(monkeypatch):
    clock = Clock(1e-3, 0.0)
    monkeypatch.setattr(module, "time", clock)
    link, buffer = Link("cpu", 1e9), torch.zeros(PIECE, dtype=torch.uint8)
    link.down(buffer, buffer.clone())
    clock.now += 60
    start = clock.now
    link.down(buffer, buffer.clone())
    assert clock.now - start >= PIECE / 1e9


def test_directions_do_not_share_a_rate(monkeypatch):
    """A copy up does not pay for the late sleep of one down, nor the reverse."""
    clock = Clock(1e-3, 0.0)
    monkeypatch.setattr(module, "time", clock)
    link, buffer = Link("cpu", 1e9), torch.zeros(PIECE, dtype=torch.uint8)
    link.down(buffer, buffer.clone())
    start = clock.now
    link.up(buffer, buffer.clone())
    assert clock.now - start >= PIECE / 1e9


def test_errors():
    link, four = Link("cpu"), torch.zeros(2, 2)
    cases = [
        (four.to("meta"), four, "source must be on cpu, is on meta"),
        (four, four.to("meta"), "out must be in host memory, is on meta"),
        (four, torch.zeros(4), r"source and out must have the same shape and dtype, are \(2, 2\) of torch.float32 and"),
        (four, four.double(), "same shape and dtype"),
        (four, torch.zeros(2, 2).t(), r"same layout, have strides \(2, 1\) and \(1, 2\)"),
        (torch.zeros(2, 4)[:, ::2], torch.zeros(2, 4)[:, ::2], "without gaps"),
    ]
    for source, out, message in cases:
        with pytest.raises(ValueError, match=message):
            link.down(source, out)
    with pytest.raises(ValueError, match="out must be on cpu, is on meta"):
        link.up(four, four.to("meta"))
    assert (link.bytes_down, link.bytes_up) == (0, 0)
    for device, rate in (("meta", None), ("cpu", 0.0), ("cpu", float("nan"))):
        with pytest.raises(ValueError, match="Invalid"):
            Link(device, rate)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda link: pickle.loads(pickle.dumps(link))])
def test_copies_are_fresh(copied):
    link = Link("cpu", 1e9, slab_bytes=1 << 16)
    link.down(torch.zeros(4), torch.zeros(4))
    other = copied(link)
    assert (other.device, other.bytes_per_second, other.slab_bytes) == (link.device, 1e9, 1 << 16)
    assert other.bytes_down == 0


class LateStream:
    """Stands for a CUDA stream: its copies run when somebody waits for them, or when the test's draw says so."""

    def __init__(self, draw) -> None:
        self.draw, self.queue, self.waited_for = draw, [], []

    def start(self, source: torch.Tensor, out: torch.Tensor) -> LateEvent:
        self.queue.append((source, out))
        event = LateEvent(self, len(self.queue))
        if self.draw():
            event.synchronize()
        return event

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)

    def synchronize(self) -> None:
        LateEvent(self, len(self.queue)).synchronize()


class LateEvent:
    def __init__(self, stream: LateStream, count: int) -> None:
        self.stream, self.count = stream, count

    def synchronize(self) -> None:
        for i, copies in enumerate(self.stream.queue[: self.count]):
            if copies is not None:
                copies[1].copy_(copies[0])
                self.stream.queue[i] = None


@pytest.mark.parametrize("late", [True, False], ids=["late", "drawn"])
@pytest.mark.parametrize("direction", ["down", "up"])
@given(quarters=st.integers(0, 12 * pinned_buffers.SLOTS), data=st.data())
def test_pinned_rings(direction, late, quarters, data):
    """Copies run as late as possible, or at drawn times; every buffer is read before it is written again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_buffers, "_pinned", lambda size: torch.full((size,), 255, dtype=torch.uint8))
        patch.setattr(
            pinned_buffers, "new_stream", lambda device: LateStream(lambda: not late and data.draw(st.booleans()))
        )
        patch.setattr(pinned_buffers, "_start", lambda stream, source, out: stream.start(source, out))
        rings = pinned_buffers.PinnedBuffers(torch.device("cpu"), 2 * pinned_buffers.SLOTS * pinned_buffers.ALIGNMENT)
        for _ in range(2):
            size = quarters * pinned_buffers.ALIGNMENT // 4 + data.draw(st.integers(0, 3))
            source, out = torch.randint(0, 255, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
            getattr(rings, direction)(source, out, None)
            assert torch.equal(out, source)
        mark = object()
        getattr(rings, direction)(source, out, mark)
        assert {"down": rings._down_stream, "up": rings._up_stream}[direction].waited_for == [mark]


def test_slab_must_hold_the_rings():
    with pytest.raises(ValueError, match=r"Invalid slab_bytes=4095\. Must be >= 4096"):
        pinned_buffers.PinnedBuffers(torch.device("cpu"), 4095)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 22])
def test_cuda(size):
    link = Link("cuda", slab_bytes=1 << 20)
    on_device, on_host = torch.randn(size, device="cuda"), torch.zeros(size)
    for _ in range(3):
        on_device.mul_(2)
        link.down(on_device, on_host, link.mark())
        assert torch.equal(on_host, on_device.cpu())
        link.up(on_host + 1, on_device, link.mark())
        assert torch.equal(on_device.cpu(), on_host + 1)
    assert link.bytes_down == link.bytes_up == 3 * 4 * size
