"""Frozen weights of units in memory-mapped files, which a step does not write to."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grass
from grass.offload import host_storage
from grass.streaming import host_block
from tests.offload.training import same
from tests.streaming.models import Network, build, train
from tests.streaming.test_parity import NORMS, assert_same_training


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files for tensors as small as these models'."""
    monkeypatch.setattr(host_storage, "SMALLEST", 1)
    monkeypatch.setattr(host_block, "SMALLEST", 1)


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("cache", [0, 1 << 30])
@pytest.mark.parametrize("mode", ["dense", "compact", "compact over int8"])
@pytest.mark.parametrize("explore", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_training(mode: str, offload: Any, cache: int, explore: int, tmp_path: Path) -> None:
    stream = {"offload": grass.Offload(path=tmp_path), "cache": cache}
    assert_same_training(mode, {"explore": explore}, offload=offload, stream=stream)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [0, 1 << 30])
def test_rows_more_precise_than_the_weight(cache: int, tmp_path: Path) -> None:
    """Such rows are stepped by another kernel where the step does not write the weight: they differ in the last bit."""
    resident, by = build("compact over bf16", streamed=False, explore=0)
    streamed, optimizer = build(
        "compact over bf16",
        streamed=True,
        explore=0,
        offload="cpu",
        stream={"offload": grass.Offload(path=tmp_path), "cache": cache},
    )
    assert train(streamed, optimizer, 10) == pytest.approx(train(resident, by, 10), rel=1e-3)  # rounding of bfloat16
    for part, other in zip(streamed.blocks.modules(), resident.blocks.modules(), strict=True):
        if hasattr(part, "active"):
            torch.testing.assert_close(part.active, other.active, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [NORMS, {**NORMS, "state_policy": "bank"}, {"decay": "all", "weight_decay": 0.1}, {"update_interval": 1000}],
)
@pytest.mark.parametrize("cache", [0, 1 << 30])
def test_options(options: dict[str, Any], cache: int, tmp_path: Path) -> None:
    stream = {"offload": grass.Offload(path=tmp_path), "cache": cache}
    assert_same_training("compact", {"explore": 0, **options}, batches=2, offload="cpu", stream=stream)


def test_a_step_writes_nothing_and_a_refresh_does(tmp_path: Path) -> None:
    model, optimizer = build(
        "compact",
        streamed=True,
        offload="cpu",
        stream={"offload": grass.Offload(path=tmp_path)},
        explore=0,
        update_interval=4,
    )

    def in_files() -> list[Tensor]:
        optimizer.offload.finish()
        return [layer.weight.detach().clone() for layer in layers]

    layers = [part for block in model.blocks for part in (block.up, block.down)]
    first = in_files()
    train(model, optimizer, 3)
    assert same(in_files(), first)
    train(model, optimizer, 1, 3)  # selects rows
    assert not any(torch.equal(now, then) for now, then in zip(in_files(), first, strict=True))


def test_weights_are_mapped_and_leave_nothing_behind(tmp_path: Path) -> None:
    model, _ = build("compact", streamed=True, stream={"offload": grass.Offload(path=tmp_path)}, explore=0)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{tmp_path}/" in line]
    assert mapped
    assert all("rw-s" in line for line in mapped)
    model.handle.close()
    del model
    assert list(tmp_path.iterdir()) == []


def test_what_reads_the_weights_sees_all_steps(tmp_path: Path) -> None:
    options: dict[str, Any] = {"explore": 0, "update_interval": 1000}
    resident, by = build("compact", streamed=False, **options)
    streamed, optimizer = build(
        "compact", streamed=True, offload="cpu", stream={"offload": grass.Offload(path=tmp_path)}, **options
    )
    train(resident, by, 3), train(streamed, optimizer, 3)
    copied = copy.deepcopy(streamed)
    assert same(copied.state_dict(), resident.state_dict())
    assert same(streamed.state_dict(), resident.state_dict())
    assert train(streamed, optimizer, 3, 3) == train(resident, by, 3, 3)
    optimizer.offload.finish()
    streamed.double(), resident.double()
    assert same(streamed.state_dict(), resident.state_dict())
    streamed.handle.close()
    grass.expand(streamed), grass.expand(resident)
    assert same(streamed.state_dict(), resident.state_dict())


def test_changes_by_hand_are_seen(tmp_path: Path) -> None:
    def run(streamed: bool, cache: int = 0) -> list[float]:
        stream = {"offload": grass.Offload(path=tmp_path), "cache": cache}
        model, optimizer = build("compact", streamed=streamed, stream=stream, explore=0)
        losses = train(model, optimizer, 2)
        with torch.no_grad():
            model.blocks[2].down.active.add_(0.25)
        losses += train(model, optimizer, 2, 2)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        losses += train(model, optimizer, 1, 4)
        model.load_state_dict(state)
        return losses + train(model, optimizer, 2, 5)

    assert run(True) == run(False)
    assert run(True, cache=1 << 30) == run(False)


def test_loads_bring_the_active_rows_too(tmp_path: Path) -> None:
    model, optimizer = build(
        "compact", streamed=True, stream={"offload": grass.Offload(path=tmp_path)}, explore=0, update_interval=1000
    )
    plain, by = build("compact", streamed=True, explore=0, update_interval=1000)
    train(model, optimizer, 3), train(plain, by, 3)
    layers = [part for part in model.blocks[0].modules() if hasattr(part, "active")]
    rows = sum(layer.active.nbytes for layer in layers)
    counts, others = model.handle.counts, plain.handle.counts
    assert counts.loads == others.loads
    assert counts.bytes == others.bytes + counts.loads * rows


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Network()
    grass.compact(model, rank=4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 100))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="streamed weights needs"):
        grass.stream(model, device="cpu", offload=grass.Offload(path=tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert len(grass.stream(model, device="cpu", offload=grass.Offload(path=tmp_path)).units) == 4


def test_too_little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_storage, "free_memory", lambda: 100)
    with pytest.raises(MemoryError, match="gradient"):
        grass.stream(Network(), device="cpu")
    monkeypatch.undo()
    model, optimizer = build("full", streamed=True, offload="cpu")
    monkeypatch.setattr(host_storage, "free_memory", lambda: 100)
    with pytest.raises(MemoryError, match="offloaded state"):
        train(model, optimizer, 1)
    monkeypatch.undo()
    train(model, optimizer, 1)


def test_free_memory(tmp_path: Path) -> None:
    assert host_storage.free_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 90 kB\nMemAvailable:   30 kB\nSwapFree: 10 kB\n")
    assert host_storage.free_memory(tmp_path) == 40 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("20000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 1000\nactive_file 500\n")
    assert host_storage.free_memory(tmp_path) == 40 * 1024
    (group / "memory.max").write_text("30000\n")
    assert host_storage.free_memory(tmp_path) == 30000 - 20000 + 1500


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_evaluation_loses_nothing(offload: Any, context: Any, tmp_path: Path) -> None:
    def run(streamed: bool) -> Any:
        stream = {"offload": grass.Offload(path=tmp_path)}
        model, optimizer = build(
            "compact", streamed=streamed, offload=offload if streamed else None, stream=stream, explore=0
        )
        seen: list[Any] = []
        for step in range(7):
            seen += train(model, optimizer, 1, step)
            model.eval()
            with context():
                seen.append(model(torch.arange(8).view(1, 8)).sum().item())
            model.train()
        return seen, model.state_dict()

    assert same(run(True), run(False))


def test_a_layer_used_by_hand_has_the_newest_values(tmp_path: Path) -> None:
    options: dict[str, Any] = {"explore": 0, "update_interval": 1000}
    resident, by = build("compact", streamed=False, **options)
    streamed, optimizer = build(
        "compact", streamed=True, offload="cpu", stream={"offload": grass.Offload(path=tmp_path)}, **options
    )
    train(resident, by, 3), train(streamed, optimizer, 3)
    x = torch.randn(2, 16)
    assert torch.equal(streamed.blocks[1].up(x), resident.blocks[1].up(x))
