"""What is planned for streamed models is what they hold, copy and take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grass
from grass.chunked_loss import chunk_loss
from grass.machine.rates import Machine
from grass.memory import Setting, plan
from grass.memory.__main__ import main
from grass.memory.architecture import Architecture
from grass.memory.methods import METHODS
from grass.memory.streaming import step_seconds, visiting
from grass.memory.tracing import LiveBytes
from tests.memory.architectures import llama

COMMON: dict[str, Any] = {"offload": True, "stream": True, "rank": 1 / 8, "seq_len": 128, "batch_size": 2}


def built(method: str, config: Any, setting: Setting) -> tuple[Any, grass.GrassAdamW, grass.Stream]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=setting.dtype).train()
    if setting.chunk_tokens:
        chunk_loss(model, setting.chunk_tokens)
    params: Any = model.parameters()
    if method != "AdamW":
        weights = "int8" if method == "Grass int8" else None
        grass.compact(model, rank=setting.rank, dim=setting.dim, dtype=setting.active_dtype, weights=weights)
        params = model
    optimizer = grass.GrassAdamW(params, lr=1e-3, offload="cpu")
    stream = grass.stream(model, device="cpu", cache=setting.cache, offload_activations=setting.host_activations)
    return model, optimizer, stream


def backward(model: Any, setting: Setting) -> None:
    ids = torch.randint(256, (setting.batch_size, setting.seq_len))
    labels: dict[str, Tensor] = {"shift_labels": ids} if setting.chunk_tokens else {}
    model(input_ids=ids, labels=ids, **labels).loss.backward()


FLOAT32, FEW = {"dtype": torch.float32}, {"seq_len": 16}
"""A CPU without instructions for bfloat16 takes a minute for a step in that: in float32, or with few tokens."""

CASES = [
    ("AdamW", FLOAT32),
    ("Grass", {"dim": 0, **FLOAT32}),
    ("Grass", FEW),
    ("Grass", {"host_activations": True, **FLOAT32}),
    ("Grass", {"cache": 40_000_000, **FLOAT32}),
    ("Grass int8", FEW),
]


@pytest.mark.parametrize(
    ("method", "options"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_units_loads_and_peak(method: str, options: dict[str, Any]) -> None:
    config = llama("60m", 6)
    setting, model = Setting(**{**COMMON, **options}), Architecture.from_config(config)
    trained, optimizer, stream = built(method, config, setting)
    planned, units = plan(method, model, setting), visiting(METHODS[method](model, setting), model, setting)
    assert [unit.nbytes for unit in stream.units] == [units.nbytes] * units.number
    for _ in range(2):
        backward(trained, setting)
        optimizer.step()
        optimizer.zero_grad()
    before = stream.counts.bytes
    ends = {id(t): t for t in (*trained.parameters(), *trained.buffers())}
    for unit in stream.units:
        for place in (*unit.places, *unit.active):
            del ends[id(place.get())]
    live = LiveBytes()
    for tensor in (*trained.parameters(), *trained.buffers()):
        live.ignore(tensor)
    with live:
        backward(trained, setting)
    peak = live.most + sum(tensor.nbytes for tensor in ends.values())
    assert stream.counts.bytes - before == units.bytes_up
    assert peak == pytest.approx(planned.peak, rel=0.05)


def seconds(method: str, setting: Setting, **rates: float) -> tuple[float, Any]:
    """Predicted seconds with these rates and all others infinite, and the units."""
    model = Architecture.from_config(llama("60m", 6))
    infinite = dict.fromkeys(("host_rate", "down_rate", "up_rate", "device_rate", "compute_rate"), float("inf"))
    held = METHODS[method](model, setting)
    machine = Machine(**{**infinite, **rates})  # type: ignore[arg-type]
    return step_seconds(method, held, model, setting, machine), visiting(held, model, setting)


@pytest.mark.parametrize("method", ["AdamW", "Grass", "Grass int8"])
@pytest.mark.parametrize("cache", [0, 20_000_000])
def test_seconds_of_one_resource(method: str, cache: int) -> None:
    setting = Setting(**COMMON, cache=cache)
    link, units = seconds(method, setting, up_rate=1e9)
    assert link == pytest.approx(units.bytes_up / 1e9)
    model, tokens = Architecture.from_config(llama("60m", 6)), setting.tokens
    trained = model.layer_matrix + model.vectors if method == "AdamW" else 0
    flops = tokens * (model.layers * (6 * model.layer_matrix + 2 * trained) + 6 * model.head)
    computing, _ = seconds(method, setting, compute_rate=1e12)
    assert 0.999 * flops / 1e12 <= computing
    if method == "AdamW":
        assert computing == pytest.approx(flops / 1e12)


def test_what_takes_longest_hides_the_rest() -> None:
    setting = Setting(**COMMON)
    link, computing = (seconds("Grass", setting, **rates)[0] for rates in ({"up_rate": 1e9}, {"compute_rate": 1e12}))
    both, _ = seconds("Grass", setting, up_rate=1e9, compute_rate=1e12)
    assert max(link, computing) <= both < 0.85 * (link + computing)  # forwards wait for loads, backwards compute longer


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    Machine(4e9, 2.5e10, 2.5e10, 5e10, "a machine", 1.4e14).save(machine)
    arguments = ["--model", "60m", "--stream", "--rank", "64", "--machine", str(machine)]
    main([*arguments, "--gpu", "260MB", "--host", "400MB", "--host-activations"])
    table = capsys.readouterr().out
    for words in ("units on the device, of all", "3 of 8", "loads of a step", "tokens a second", "activations on host"):
        assert words in table
    assert "fits 0.26 GB, host 0.40 GB" in table
    fitting = next(line for line in table.splitlines() if line.startswith("fits"))
    small = ("Grass", "Grass int8", "LoRA", "QLoRA")
    assert fitting.split()[-len(METHODS) :] == ["yes" if method in small else "no" for method in METHODS]
    main(swept := [*arguments, "--sweep", "4x100"])
    hours = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hours")]
    main([*swept, "--tflops", "1000"])  # copies and updates count all the same
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("hours")] == hours != []
    for wrong, words in (
        (["--model", "60m", "--cache", "1GB"], "only with --stream=True"),
        (["--model", "60m", "--stream", "--no-checkpointing"], "needs offload and checkpointing"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert words in capsys.readouterr().err
    assert json.loads(machine.read_text())["compute_rate"] == 1.4e14
