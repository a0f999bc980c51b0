"""What a step computes does not depend on ``torch.set_default_device``: every tensor is created on a stated device.

A tensor without one would be on the meta device here, and have no values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grass
from tests.compact_mode.networks import Network, batches, train
from tests.experts.models import Experts
from tests.experts.models import train as train_experts
from tests.streaming import models as streaming
from tests.test_default_dtype import SETTINGS, assert_same, compact, contents, dense

WITHOUT = torch.device("meta")


def under(device: torch.device, model: nn.Module, build: Any, data: Any, **options: Any) -> list[Any]:
    with device:
        optimizer = build(model, **options)
        train(model, optimizer, data[:3])
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, data[3:])
        return contents(model, optimizer)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("build", [dense, compact])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["of float32", "of bfloat16"])
def test_layers(dtype: torch.dtype, build: Any, options: dict[str, Any], fused: bool | None) -> None:
    if options.get("replacement") and build is compact:
        pytest.skip("compact mode draws without replacement")
    options = {"stochastic_rounding": dtype == torch.bfloat16, "fused": fused, **options}
    cpu, meta = (
        under(device, Network(dtype), build, batches(5, dtype=dtype), **options)
        for device in (torch.device("cpu"), WITHOUT)
    )
    assert_same([cpu, meta])


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("files", [False, True], ids=["", "in files"])
@pytest.mark.parametrize("masters", [False, True])
def test_offload(masters: bool, files: bool, weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grass.offload.host_storage.SMALLEST", 1)
    results = []
    for device in (torch.device("cpu"), WITHOUT):
        model = Network(torch.bfloat16 if masters else torch.float32)
        with device:
            grass.compact(model, rank=3, weights=weights)
        offload = grass.Offload(masters=masters, path=tmp_path if files else None)
        data = batches(5, dtype=torch.bfloat16 if masters else torch.float32)
        results.append(under(device, model, grass.GrassAdamW, data, lr=1e-2, update_interval=2, offload=offload))
    assert_same(results)


@pytest.mark.parametrize("files", [False, True], ids=["", "in files"])
def test_streaming(files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grass.streaming.host_block.SMALLEST", 1)
    results = []
    for device in (torch.device("cpu"), WITHOUT):
        model, optimizer = streaming.build("compact", streamed=False, offload="cpu")
        ids = torch.arange(8).view(2, 4)

        def loss(x: torch.Tensor, model: Any = model) -> torch.Tensor:
            out: torch.Tensor = model(x).square().mean()
            return out

        with device:
            stream = grass.stream(model, "cpu", offload=grass.Offload(path=tmp_path if files else None))
            for _ in range(3):
                torch.manual_seed(0)
                loss(ids).backward()
                stream.step([ids, ids + 1], loss)
                optimizer.step()
                optimizer.zero_grad()
            results.append(contents(model, optimizer))
            stream.close()
    assert_same(results)


@pytest.mark.parametrize("policy", ["reset", "bank"])
@pytest.mark.parametrize("build", [dense, compact])
def test_experts(build: Any, policy: str) -> None:
    results = []
    for device in (torch.device("cpu"), WITHOUT):
        torch.manual_seed(0)
        model = Experts()
        with device:
            optimizer = build(model, state_policy=policy)
        train_experts(model, optimizer, 5)
        results.append(contents(model, optimizer))
    assert_same(results)


def test_diagnostics_and_in_backward() -> None:
    results = []
    for device in (torch.device("cpu"), WITHOUT):
        model, data = Network(), batches(5)
        with device:
            optimizer = dense(model, selection="multinomial_norm")
            grass.step_in_backward(optimizer)
            history = grass.diagnostics.SelectionHistory(optimizer)
            for x, y in data:
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                history.record()
        results.append(contents(model, optimizer))
    assert_same(results)
