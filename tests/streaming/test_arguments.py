"""What ``grass.stream`` refuses, and that it refuses before it changes the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import grass
from tests.distributed.world import in_own_process
from tests.streaming.models import Network

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "cache of the wrong type": ({"cache": 1.5}, TypeError, "cache=1.5"),
    "cache is a flag": ({"cache": True}, TypeError, "cache=True"),
    "cache below 0": ({"cache": -1}, ValueError, "cache=-1"),
    "cache of an unknown kind": ({"cache": "all"}, ValueError, "cache='all'"),
    "units is a string": ({"units": "blocks"}, TypeError, "units='blocks'"),
    "units of the wrong type": ({"units": [0]}, TypeError, r"units=\[0\]"),
    "units of an unknown name": ({"units": ["blocks", "layers"]}, ValueError, "'layers'"),
    "no units": ({"units": []}, ValueError, "units="),
    "a unit in another's module": ({"units": ["blocks.0", "blocks.0.up"]}, ValueError, "lie in each other"),
    "cache in words": ({"cache": "4GB"}, ValueError, "number of bytes"),
    "device that does not exist": ({"device": "gpu"}, ValueError, "device='gpu'"),
    "device that is a number": ({"device": 3}, TypeError, "device=3"),
    "no device where there is none": ({"device": None}, ValueError, "no accelerator"),
    "offload_activations of the wrong type": ({"offload_activations": "x"}, TypeError, "offload_activations='x'"),
    "path that is a file": ({"offload": {"path": __file__}}, ValueError, "path="),
    "path that is no path": ({"offload": {"path": 3}}, TypeError, "path=3"),
    "path without a name": ({"offload": {"path": ""}}, ValueError, "path=''"),
    "rate in words": ({"offload": {"_bytes_per_second": "1GB"}}, TypeError, "_bytes_per_second='1GB'"),
    "no deadline": ({"offload": {"deadline": None}}, TypeError, "deadline=None"),
    "device of another kind": ({"device": "mps"}, ValueError, "device='mps'"),
    "rate of 0": ({"offload": {"_bytes_per_second": 0}}, ValueError, "_bytes_per_second=0"),
    "rate below 0": ({"offload": {"_bytes_per_second": -1.0}}, ValueError, "_bytes_per_second=-1.0"),
    "deadline of 0": ({"offload": {"deadline": 0}}, ValueError, "deadline=0"),
    "deadline that is no number": ({"offload": {"deadline": float("nan")}}, ValueError, "deadline=nan"),
}


def stream(model: nn.Module, offload: dict[str, Any] | None = None, **options: Any) -> None:
    grass.stream(model, offload=grass.Offload(**(offload or {})), **options)


@pytest.mark.parametrize(("options", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Network()
    with pytest.raises(error, match=message):
        stream(model, **{"device": "cpu", **options})
    assert not any("Streamed" in type(part).__name__ for part in model.modules())
    assert len(grass.stream(model, device="cpu").units) == 4


def test_what_is_no_module() -> None:
    with pytest.raises(TypeError, match="must be a module, got list"):
        grass.stream([nn.Linear(2, 2)], device="cpu")  # type: ignore[arg-type]


def test_a_model_without_lists_of_modules() -> None:
    with pytest.raises(ValueError, match="units="):
        grass.stream(nn.ModuleDict({"one": nn.Linear(4, 4)}), device="cpu")
    assert len(grass.stream(nn.ModuleDict({"one": nn.Linear(4, 4)}), device="cpu", units=["one"]).units) == 1


def test_streamed_twice() -> None:
    model = Network()
    handle = grass.stream(model, device="cpu")
    for part in (model, model.blocks, model.blocks[0], nn.Sequential(model)):
        with pytest.raises(ValueError, match="streamed already"):
            grass.stream(part, device="cpu", units=[""])
    handle.close()
    assert len(grass.stream(model, device="cpu").units) == 4


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Network()
    with pytest.raises(ValueError, match=r"'embedding.weight' is on meta: build the model on the CPU"):
        grass.stream(model, device="cpu")
    model = Network()
    model.blocks[2].norm.to("meta")
    with pytest.raises(ValueError, match=r"'blocks.2.norm.weight' is on meta"):
        grass.stream(model, device="cpu")


def test_a_buffer_on_the_meta_device() -> None:
    model = Network()
    model.register_buffer("shift", torch.empty(16, device="meta"))
    with pytest.raises(ValueError, match="'shift' is on meta"):
        grass.stream(model, device="cpu")


def test_a_replicated_model() -> None:
    with pytest.raises(ValueError, match="computes on one device"):
        grass.stream(nn.DataParallel(Network()), device="cpu")


@pytest.mark.parametrize("compiled", ["blocks.1", "blocks.1.up"])
def test_a_compiled_unit(compiled: str) -> None:
    model = Network()
    model.get_submodule(compiled).compile(backend="eager")
    if compiled == "blocks.1":
        with pytest.raises(ValueError, match=r"'blocks.1' is compiled"):
            grass.stream(model, device="cpu")
    else:
        grass.stream(model, device="cpu")
        model(torch.arange(8).view(1, 8)).sum().backward()


def test_parameters_added_later() -> None:
    model = Network()
    handle = grass.stream(model, device="cpu")
    model.blocks[0].scale = nn.Parameter(torch.ones(1))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"'blocks.0' had \d+ parameters at grass.stream\(\) and has \d+ now"):
        model(torch.arange(8).view(1, 8))
    handle.close()
    grass.stream(model, device="cpu")
    model(torch.arange(8).view(1, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.numel() != 1)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(ValueError, match="no accelerator"):
        grass.stream(Network())
    with pytest.raises(ValueError, match="no such device"):
        grass.stream(Network(), "cuda")


def test_a_streamed_model_is_not_converted() -> None:
    model = Network()
    handle = grass.stream(model, device="cpu")
    with pytest.raises(RuntimeError, match="streamed"):
        grass.compact(model, rank=4)
    handle.close()
    grass.compact(model, rank=4)
    handle = grass.stream(model, device="cpu")
    with pytest.raises(RuntimeError, match="streamed"):
        grass.expand(model)
    handle.close()
    assert grass.expand(model)


@pytest.mark.slow
@in_own_process
def test_ddp_around_a_streamed_model() -> None:
    model = Network()
    grass.stream(model, device="cpu")
    wrapped = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="computes on one device: use FSDP2's CPUOffloadPolicy instead of DDP"):
        wrapped(torch.zeros(1, 2, dtype=torch.long))
