"""What is on the device, and how often it was copied there."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import grass
from grass import GrassAdamW
from grass.machine.link import Link
from grass.offload.executor import Executor
from grass.streaming import host_block
from grass.streaming.prefetch import AHEAD, BACKWARD, FORWARD, INFERENCE, Order, Prefetcher, Use
from tests.streaming.models import Network, build, train

UNITS = 6


def streamed(units: int = UNITS, **options: Any) -> tuple[Any, grass.Stream]:
    torch.manual_seed(0)
    model = Network(units)
    return model, grass.stream(model, device="cpu", **options)


def backward(model: nn.Module, batches: int = 1) -> None:
    for _ in range(batches):
        model(torch.arange(16).view(2, 8)).sum().backward()


@pytest.mark.parametrize("units", [4, 6, 9])
def test_loads_of_a_step(units: int) -> None:
    """Forward loads all, backward all but the last three, which are there still."""
    model, handle = streamed(units)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 4):
        train(model, optimizer, 1)
        assert handle.counts.loads == step * (2 * units - 3)
        assert handle.counts.bytes == handle.counts.loads * handle.units[0].nbytes
    assert handle.counts.updates == 0


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"dim": 0}])
@pytest.mark.parametrize("cached", [0, 2])
def test_of_converted_units_on_the_device_only_rows_come_again(options: dict[str, Any], cached: int) -> None:
    torch.manual_seed(0)
    model = Network(UNITS)
    grass.compact(model, rank=4, explore=3, **options)
    optimizer = GrassAdamW(model, lr=1e-2, update_interval=2, offload="cpu")
    sizes = host_block.HostBlock("", model.blocks[0], set())
    handle = grass.stream(model, device="cpu", cache=cached * sizes.nbytes)
    train(model, optimizer, 2)
    loads, before, there = handle.counts.loads, handle.counts.bytes, AHEAD + 1 + cached
    train(model, optimizer, 3)
    assert handle.counts.loads - loads == 3 * 2 * (UNITS - there)
    assert handle.counts.updates == 4 * there
    weights = {layer.weight: layer for layer in sizes.layers}
    others = sum(place.get().nbytes for place in sizes.places if place.get() not in weights)
    rows = sum(w.nbytes // layer.shape[layer.dim] * 7 for w, layer in weights.items())
    assert handle.counts.bytes - before == 3 * (2 * (UNITS - there) * sizes.nbytes + there * (others + rows))


@pytest.mark.parametrize("change", ["weight", "active", "twice", "decay"])
def test_other_changes_bring_the_whole_weight(change: str) -> None:
    """Two steps without a forward, decay of all rows, changes by hand."""

    def run(streamed: bool) -> Any:
        options = {"decay": "all", "weight_decay": 0.5} if change == "decay" else {}
        model, optimizer = build("compact", streamed=streamed, **options)
        losses = train(model, optimizer, 2)
        layer = model.blocks[0].up
        if change == "twice":
            for p in model.parameters():
                p.grad = torch.ones_like(p) if p.requires_grad else None
            optimizer.step()
            optimizer.zero_grad()
        elif change in ("weight", "active"):
            with torch.no_grad():
                getattr(layer, change).mul_(0.5)
        return losses + train(model, optimizer, 2, 2)

    assert run(True) == run(False)


def test_micro_batches_find_the_first_units_there() -> None:
    model, handle = streamed()
    backward(model, 3)
    assert handle.counts.loads == (2 * UNITS - 3) + 2 * (2 * UNITS - 6)


@pytest.mark.parametrize("cached", [0, 1, 2, 3, 10])
def test_a_cache_saves_loads_of_unchanged_units(cached: int) -> None:
    size = streamed()[1].units[0].nbytes
    model, handle = streamed(cache=cached * size)
    backward(model)
    before = handle.counts.loads
    backward(model)
    assert handle.counts.loads - before == 2 * max(0, UNITS - 3 - cached)


class Alive:
    """Counts the units whose memory on the device is not free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        views = host_block._views

        def noted(flat: Tensor, tensors: Any) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            flat.fill_(0xFF)  # not a number until it was copied
            storage = _Owner()
            weakref.finalize(storage, self._freed)
            for view in views(flat, tensors):
                view.owner = storage  # type: ignore[attr-defined]  # as long as one view lives
                yield view

        monkeypatch.setattr(host_block, "_views", noted)

    def _freed(self) -> None:
        self.now -= 1


class _Owner: ...


@pytest.mark.parametrize("cached", [0, 1])
@pytest.mark.parametrize("offload_activations", [False, True])
@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "compact", "compact over int8"])
def test_at_most_three_units_are_there_beside_the_cache(
    monkeypatch: pytest.MonkeyPatch, mode: str, offload_activations: bool, cached: int
) -> None:
    size = build(mode, streamed=True)[0].handle.units[0].nbytes
    alive = Alive(monkeypatch)
    options = {"offload_activations": offload_activations, "cache": cached * size}
    model, optimizer = build(mode, streamed=True, offload="cpu", stream=options)
    train(model, optimizer, 3, batches=2)
    model.eval()
    with torch.no_grad():
        model(torch.arange(8).view(1, 8))
    assert alive.most == AHEAD + 1 + cached
    model.handle.close()
    gc.collect()
    assert alive.now == 0


@pytest.mark.parametrize("conversion", [None, {"rank": 4, "explore": 3}, {"rank": 4, "weights": "int8"}])
def test_a_step_of_another_optimizer_copies_nothing(conversion: dict[str, Any] | None) -> None:
    """Units that are cached and unchanged stay as they are while other models of the process train."""
    torch.manual_seed(0)
    model = Network(UNITS, dropout=0.0)
    if conversion:
        grass.compact(model, **conversion)
    handle = grass.stream(model, device="cpu", cache=1 << 30)
    outside = torch.optim.SGD([*model.embedding.parameters(), *model.head.parameters()], lr=0.1)
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    backward(model)
    loads, copied = handle.counts.loads, handle.counts.bytes
    for _ in range(2):
        other.step()
        outside.step()
        backward(model)
    assert (handle.counts.loads, handle.counts.updates, handle.counts.bytes) == (loads, 0, copied)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_of_one_unit_copies_that_one_again(fused: bool) -> None:
    model, handle = streamed(cache=1 << 30)
    one = torch.optim.AdamW(model.blocks[2].parameters(), fused=fused)
    backward(model)
    for step in range(1, 4):
        before = handle.counts.bytes
        one.step()
        x = model(torch.arange(16).view(2, 8))
        assert handle.counts.bytes - before == handle.units[2].nbytes, f"step {step}"
        x.sum().backward()


@pytest.mark.parametrize("named", [None, [f"blocks.{i}.{name}" for i in range(4) for name in ("up", "down")]])
@pytest.mark.parametrize("mode", ["full", "dense", "compact", "compact over int8"])
def test_memory_is_free_when_the_last_reference_goes(mode: str, named: list[str] | None) -> None:
    """Without the garbage collector; also where the units themselves are converted layers."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer = build(mode, streamed=True, offload="cpu", stream={"units": named, "cache": 1 << 30})
        train(model, optimizer, 3)
        tensors = [t for unit in model.handle.units for t in (*unit.trained(), *(p.get() for p in unit.places))]
        held = [t for block in model.handle._prefetcher._held.values() for t in block.tensors]
        alive = [weakref.ref(t) for t in (*tensors, *held)]
        del tensors, held
        optimizer.offload.finish()
        del model, optimizer
        assert not [reference() for reference in alive if reference() is not None]
    finally:
        gc.enable()


def test_a_handle_outlives_its_model() -> None:
    handle = streamed()[1]
    handle.close()
    with pytest.raises(ReferenceError, match="nothing refers to the model"):
        handle.step([torch.arange(8)], lambda ids: ids.sum())


def test_the_order_is_learned() -> None:
    order = Order(4)
    assert [unit for unit, _ in order.ahead(Use(0, FORWARD))] == [0, 1, 2, 3]
    assert list(order.ahead(Use(1, BACKWARD))) == [(1, False), (0, False), (2, True), (3, True)]
    for unit in (0, 2, 1, 3):  # another order than that of the list
        order.note(Use(unit, INFERENCE))
    order.note(Use(0, INFERENCE))
    assert [unit for unit, _ in order.ahead(Use(0, INFERENCE))] == [0, 2, 1, 3]
    assert [unit for unit, _ in order.ahead(Use(3, INFERENCE))] == [3, 0, 2, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([FORWARD, BACKWARD, INFERENCE])), max_size=30))
def test_any_order_of_uses(uses: list[tuple[int, str]]) -> None:
    """Each use gets the host's values, whatever came before; what is held stays within its bounds."""
    torch.manual_seed(0)
    modules = [nn.Linear(3, 2) for _ in range(4)]
    units = [host_block.HostBlock(str(i), module, set()) for i, module in enumerate(modules)]
    prefetcher = Prefetcher(units, Link("cpu"), Executor(("up",)), cache=units[0].nbytes)
    for number, kind in uses:
        if kind == INFERENCE:
            with torch.no_grad():
                units[number].module.weight.add_(1)
        there = prefetcher.use(number, kind, probe=False)
        expected = [place.get() for place in units[number].places]
        assert all(torch.equal(a, b) for a, b in zip(there, expected, strict=True))
        assert len(prefetcher._held) <= AHEAD + 2
