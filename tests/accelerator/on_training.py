"""Training on the stand-in: offloaded, streamed, or with work in the background, as resident training, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import standin

standin.install()

import grass  # noqa: E402
from grass import GrassAdamW, Offload  # noqa: E402
from grass.device import new_stream, on  # noqa: E402
from grass.machine.link import Link  # noqa: E402
from grass.parallel.background import Background  # noqa: E402
from grass.state import master  # noqa: E402
from tests.experts import models as experts  # noqa: E402
from tests.offload import training  # noqa: E402
from tests.offload.training import same  # noqa: E402
from tests.streaming import models  # noqa: E402

DEVICE = "standin:0"
STEPS = 6  # rows are chosen in the first and in the fifth
MODES = training.MODES
OFFLOADS: dict[str, dict[str, Any]] = {
    "on the host": {"fraction": 0.0},
    "by turns": {"fraction": 0.4},
    "without overlap": {"overlap": False},
}
STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "activations on the host": {"offload_activations": True},
    "all cached": {"cache": 1 << 20},
    "some cached": {"cache": 12 << 10},
}


@pytest.fixture(autouse=True)
def no_fault_is_left():
    yield
    assert not standin.end()


def values_of(model: torch.nn.Module, optimizer: GrassAdamW) -> tuple[Any, Any]:
    """All values of the model and of the optimizer's state, on the host."""
    state = optimizer.state_dict()["state"]
    states = {p: {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for p, s in state.items()}
    return {name: value.cpu() for name, value in model.state_dict().items()}, states


def offloaded(mode: Any, options: dict[str, Any] | None, seed: int, **others: Any) -> tuple[Any, ...]:
    standin.seed_order(seed)
    offload = None if options is None else Offload(**options)
    model, optimizer = training.build(mode, offload, DEVICE, fused=False, **others)
    return training.train(model, optimizer, STEPS), *values_of(model, optimizer)


def streamed(mode: str, options: dict[str, Any] | None, seed: int, **others: Any) -> tuple[Any, ...]:
    standin.seed_order(seed)
    is_streamed = options is not None
    model, optimizer = models.build(
        mode, streamed=is_streamed, offload="cpu", stream=options, device=DEVICE, fused=False, **others
    )
    # a norm over two devices adds up in another order, so nothing is clipped
    return models.train(model, optimizer, STEPS, clip=1e9), *values_of(model, optimizer)


@pytest.fixture(scope="module")
def resident() -> dict[Any, Any]:
    """Results without offload or streaming, computed once."""
    return {}


def check_offload(mode: str, way: str, seeds: range, resident: dict[Any, Any]) -> None:
    if mode not in resident:
        resident[mode] = offloaded(mode, None, 0)
    for seed in seeds:
        assert same(offloaded(mode, OFFLOADS[way], seed), resident[mode]), f"seed {seed}"


def check_stream(mode: str, way: str, seeds: range, resident: dict[Any, Any]) -> None:
    if ("stream", mode) not in resident:
        resident["stream", mode] = streamed(mode, None, 0)
    for seed in seeds:
        assert same(streamed(mode, STREAMS[way], seed), resident["stream", mode]), f"seed {seed}"


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_in_many_pieces(pinned: bool) -> None:
    """Copies through small rings of pinned buffers, while the device still computes what is copied or overwritten."""
    link = Link(DEVICE, slab_bytes=8 * 512)
    for seed in range(10):
        standin.seed_order(seed)
        expected = torch.randn(3000, generator=torch.Generator().manual_seed(seed), pin_memory=pinned)
        host = torch.zeros(3000, pin_memory=pinned)
        there = torch.zeros(3000, device=DEVICE)
        earlier = [there + i for i in range(5)]
        link.up(expected, there, link.mark())
        doubled = there * 2 + 0 * sum(earlier)
        link.down(doubled, host, link.mark())
        assert torch.equal(host, expected * 2), f"seed {seed}"
        assert all(t.eq(i).all() for i, t in enumerate(earlier)), f"seed {seed}"


def test_work_in_the_background() -> None:
    """It reads what the step before computes late; the step after reads what it makes, and frees it for later work."""
    background, device = Background(), torch.device(DEVICE)
    for seed in range(20):
        standin.seed_order(seed)
        values = torch.zeros(300, device=device)
        for _ in range(5):
            values = values + 1
        state = {"values": values}
        del values
        background.run(lambda state=state: state.update(values=state["values"] * 2), state, device)
        torch.full((300,), 7.0, device=device)
        background.finish()
        freed, other = threading.Event(), dict[str, Any]()
        background.run(lambda freed=freed, other=other: after(freed, other), other, device)
        found = state.pop("values") + 1
        freed.set()
        background.finish()
        assert found.eq(11).all(), f"seed {seed}"


def after(freed: threading.Event, state: dict[str, Any]) -> None:
    """Take the memory of what was freed while this work was already waiting."""
    freed.wait()
    state["values"] = torch.full((300,), 7.0, device=DEVICE)


WAYS = {
    **{f"{way}, {mode}": (check_offload, mode, way) for way in OFFLOADS for mode in MODES},
    **{f"streamed, {way}, {mode}": (check_stream, mode, way) for way in STREAMS for mode in MODES},
}
QUICK = [
    "on the host, compact",
    "by turns, dense",
    "by turns, compact over bf16",
    "streamed, plain, compact",
    "streamed, some cached, compact over int8",
    "streamed, activations on the host, dense",
]


@pytest.mark.parametrize("name", QUICK)
def test_a_few_orders(name: str, resident: dict[Any, Any]) -> None:
    check, mode, way = WAYS[name]
    check(mode, way, range(2), resident)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_many_orders(name: str, resident: dict[Any, Any]) -> None:
    check, mode, way = WAYS[name]
    check(mode, way, range(2, 12), resident)


@pytest.mark.parametrize("mode", ["dense", "compact"])
def test_default_device(mode: str) -> None:
    """What has to be on the host is there, whatever device tensors are made on by default."""
    with torch.device(DEVICE):
        expected = streamed(mode, None, 0)
        for way in ("plain", "activations on the host"):
            assert same(streamed(mode, STREAMS[way], 1), expected), way


def rounded(options: dict[str, Any] | None, seed: int) -> tuple[Any, ...]:
    standin.seed_order(seed)
    offload = None if options is None else Offload(masters=False, **options)
    model, optimizer = training.build("full", offload, fused=False, stochastic_rounding=True)
    model = model.to(DEVICE, torch.bfloat16)
    optimizer = GrassAdamW(model.parameters(), lr=1e-2, offload=offload, fused=False, stochastic_rounding=True)
    return training.train(model, optimizer, STEPS), *values_of(model, optimizer)


def test_rounded_parameters_step_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices as small as these would have masters, and not be rounded."""
    monkeypatch.setattr(master, "SMALL", 0)
    expected = rounded(None, 0)
    assert same(rounded({"fraction": 0.4}, 0), expected)


def with_masters(fraction: float, seed: int) -> tuple[Any, ...]:
    standin.seed_order(seed)
    model = training.network().to(DEVICE, torch.bfloat16)
    offload = Offload(masters=True, fraction=fraction)
    optimizer = GrassAdamW(model.parameters(), lr=1e-2, offload=offload, fused=False)
    return training.train(model, optimizer, STEPS), *values_of(model, optimizer)


def test_masters_step_by_turns() -> None:
    expected = with_masters(0.0, 0)
    for seed in range(2):
        assert same(with_masters(0.4, seed), expected), f"seed {seed}"


def banked(seed: int, *, in_background: bool, selection: str = "multinomial_norm") -> tuple[Any, ...]:
    """Training with a bank, whose exchange runs in the background or at once."""
    standin.seed_order(seed)
    chosen = {"state_policy": "bank", "selection": selection, "update_interval": 2, "explore": 0}
    model, optimizer = training.build("compact", None, DEVICE, fused=False, **chosen)
    if not in_background:
        optimizer._background.run = lambda work, state, device: work()  # type: ignore[method-assign]
    return training.train(model, optimizer, STEPS), *values_of(model, optimizer)


def test_the_exchange_in_the_background() -> None:
    with standin.eager():
        expected = banked(0, in_background=False)
    for seed in range(4):
        assert same(banked(seed, in_background=True), expected), f"seed {seed}"


def with_experts(seed: int, offload: Offload | None, **conversion: Any) -> tuple[Any, ...]:
    """Training of experts, of which some have no tokens in some steps and rest."""
    standin.seed_order(seed)
    torch.manual_seed(0)
    model = experts.Experts()
    grass.compact(model, rank=4, explore=2, **conversion)
    model.to(DEVICE)
    optimizer = GrassAdamW(model, lr=1e-2, update_interval=2, offload=offload, fused=False)
    return experts.train(model, optimizer, STEPS), *values_of(model, optimizer)


@pytest.mark.parametrize("dim", [0, 1])
def test_experts(dim: int) -> None:
    expected = with_experts(0, None, dim=dim)
    for seed in range(2):
        assert same(with_experts(seed, Offload(fraction=0.5), dim=dim), expected), f"seed {seed}"


@pytest.mark.parametrize("way", ["resident", "offloaded", "streamed"])
def test_checkpoints(way: str, tmp_path: Path) -> None:
    """Saved while the step is on its way; another model and optimizer go on from the file."""

    def begun(seed: int) -> tuple[Any, GrassAdamW]:
        standin.seed_order(seed)
        if way == "streamed":
            return models.build("compact", streamed=True, offload="cpu", device=DEVICE, fused=False)
        offload = Offload(fraction=0.5) if way == "offloaded" else None
        return training.build("compact", offload, DEVICE, fused=False)

    def train(model: Any, optimizer: GrassAdamW, steps: int, first: int = 0) -> list[float]:
        if way == "streamed":
            return models.train(model, optimizer, steps, first, clip=1e9)
        return training.train(model, optimizer, steps, first)

    whole = begun(0)
    expected = train(*whole, STEPS)
    for seed in range(2):
        model, optimizer = begun(seed)
        losses = train(model, optimizer, 3)
        torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
        train(model, optimizer, 1, first=9)  # does not change what was saved
        state, optimizer_state = torch.load(tmp_path / "checkpoint.pt", weights_only=True, map_location="cpu")
        model, optimizer = begun(seed + 10)
        train(model, optimizer, 1)
        model.load_state_dict(state)
        optimizer.load_state_dict(optimizer_state)
        losses += train(model, optimizer, STEPS - 3, first=3)
        assert losses == expected, f"seed {seed}"
        assert same(values_of(model, optimizer), values_of(*whole)), f"seed {seed}"


def in_backward(seed: int, *, inside: bool) -> tuple[Any, ...]:
    standin.seed_order(seed)
    model, optimizer = training.build("dense", None, DEVICE, fused=False)
    if inside:
        grass.step_in_backward(optimizer)
    losses = []
    for step in range(STEPS):
        x = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, *values_of(model, optimizer)


def test_steps_inside_backward() -> None:
    expected = in_backward(0, inside=False)
    for seed in range(3):
        assert same(in_backward(seed, inside=True), expected), f"seed {seed}"


def by_micro_batches(seed: int, *, turns: bool) -> tuple[Any, ...]:
    """Steps of several micro-batches: all of them through one unit at a time, or one after another."""
    standin.seed_order(seed)
    model, optimizer = models.build(
        "compact", streamed=True, offload="cpu", stream={"offload_activations": True}, device=DEVICE, fused=False
    )
    model.eval()  # without dropout, which draws in another order
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        batches = [torch.randint(32, (4, 8)).to(DEVICE) * 1 for _ in range(3)]  # computed late

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

        if turns:
            losses.append(model.handle.step(batches, loss_of).item())
        else:
            each = [loss_of(x) for x in batches]
            for loss in each:
                loss.backward()
            losses.append(torch.stack([loss.detach() for loss in each]).sum().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, *values_of(model, optimizer)


def test_micro_batches_that_pass_together() -> None:
    expected = by_micro_batches(0, turns=False)
    for seed in range(3):
        assert same(by_micro_batches(seed, turns=True), expected), f"seed {seed}"


def test_micro_batches_on_another_stream() -> None:
    """Their threads go on with the stream of the caller, on which the batches are computed."""
    with on(new_stream(torch.device(DEVICE))):
        expected = by_micro_batches(0, turns=False)
        for seed in range(3):
            assert same(by_micro_batches(seed, turns=True), expected), f"seed {seed}"
