"""Planned tasks, seconds and files of offloaded steps are those of the engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import grass
from grass.machine.rates import Machine
from grass.memory import Architecture, Setting, plan
from grass.memory.__main__ import main
from grass.memory.offloading import step_tasks
from grass.offload.tasks import Task, makespan
from tests.memory.architectures import KINDS

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4, use_cache=False
)
SETTING = Setting(rank=16, explore=8, seq_len=16, chunk_tokens=0, offload=True, files=True)
MACHINES = {
    "link": Machine(1e9, 2e6, 2e6, 1e9, "a slow link"),
    "host": Machine(1e6, 1e9, 1e9, 1e9, "a slow host"),
    "even": Machine(1e6, 4e6, 4e6, 1e9, "an even one"),
}
METHODS = ["AdamW", "Grass", "Grass int8"]


def trained(method: str, setting: Setting, config: Any = CONFIG, **offload: Any) -> grass.GrassAdamW:
    """An offloaded optimizer after two steps, the first of which finds the order of the forward."""
    model = AutoModelForCausalLM.from_config(config).to(setting.dtype)
    params = model.named_parameters()
    options = {}
    if method != "AdamW":
        weights = "int8" if method == "Grass int8" else None
        rows = {"rank": setting.rank, "explore": setting.explore, "dim": setting.dim}
        grass.compact(model, **rows, dtype=setting.active_dtype, weights=weights)
        bank = str(setting.bank_dtype).removeprefix("torch.")
        options = {"moment_dtype": setting.moment_dtype, "state_policy": setting.state_policy, "bank_dtype": bank}
        params = model
    optimizer = grass.GrassAdamW(
        params, offload=grass.Offload(overlap=False, masters=setting.masters, **offload), **options
    )
    ids = torch.arange(16).view(1, 16)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def amounts(tasks: list[Task]) -> dict[str, list[float]]:
    return {name: sorted(t.amount for t in tasks if t.resource == name) for name in ("down", "host", "up")}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["small", "llama-tied", "llama-biases", "gpt2"])
def test_amounts_are_those_of_the_tasks(method: str, kind: str) -> None:
    config = CONFIG if kind == "small" else KINDS[kind]
    optimizer = trained(method, SETTING, config)
    assert optimizer.offload is not None
    tasks = step_tasks(method, Architecture.from_config(config), SETTING)
    assert amounts(tasks) == amounts(optimizer.offload.last_tasks)
    assert amounts(tasks) == amounts(optimizer.offload.plan(0.0))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amounts_by_dim_and_precision(dim: int, dtype: torch.dtype) -> None:
    setting = Setting(rank=16, explore=8, dim=dim, dtype=dtype, seq_len=16, chunk_tokens=0, offload=True)
    optimizer = trained("Grass", setting)
    assert optimizer.offload is not None
    tasks = step_tasks("Grass", Architecture.from_config(CONFIG), setting)
    assert amounts(tasks) == amounts(optimizer.offload.last_tasks)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("method", METHODS)
def test_seconds_are_those_of_the_engine(method: str, machine: Machine) -> None:
    optimizer = trained(method, SETTING)
    assert optimizer.offload is not None
    planned = makespan(step_tasks(method, Architecture.from_config(CONFIG), SETTING), machine.seconds)
    assert planned == pytest.approx(makespan(optimizer.offload.last_tasks, machine.seconds), rel=1e-9)
    assert planned == pytest.approx(makespan(optimizer.offload.plan(0.0), machine.seconds), rel=0.05)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("AdamW", {}),
        ("AdamW", {"masters": True}),
        ("Grass", {}),
        ("Grass", {"masters": True}),
        ("Grass", {"moment_dtype": "8bit", "state_policy": "bank"}),
        ("Grass", {"moment_dtype": "bfloat16", "state_policy": "bank", "bank_dtype": torch.bfloat16, "dim": 0}),
        ("Grass", {"state_policy": "reset", "dtype": torch.float32}),
        ("Grass int8", {"dim": 0}),
    ],
    ids=str,
)
def test_bytes_in_files_are_those_that_are_written(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grass.offload.host_storage.SMALLEST", 4096)
    monkeypatch.setattr("grass.memory.offloading.SMALLEST", 4096)
    setting = Setting(rank=16, explore=8, seq_len=16, chunk_tokens=0, offload=True, files=True, **options)
    allocate, written = os.posix_fallocate, []

    def noted(file: int, offset: int, size: int) -> None:
        written.append(size)
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    optimizer = trained(method, setting, path=tmp_path)
    planned = plan(method, Architecture.from_config(CONFIG), setting)
    assert planned.files == sum(written) > 0
    assert planned.on_host == planned.bank + sum(planned.host) - planned.files
    del optimizer


def test_files_only_where_they_are_asked_for() -> None:
    model = Architecture.from_config(CONFIG)
    inside = plan("Grass", model, Setting(rank=16, seq_len=16, chunk_tokens=0, offload=True))
    resident = plan("Grass", model, Setting(rank=16, seq_len=16, chunk_tokens=0, files=True))
    assert (inside.files, resident.files) == (0, 0)
    assert plan("GaLore", model, SETTING).files == 0


def test_seconds_and_files_in_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    MACHINES["even"].save(tmp_path / "machine.json")
    shown = ["--model", "1m", "--rank", "16", "--seq", "64", "--machine", str(tmp_path / "machine.json")]
    main([*shown, "--offload-path", str(tmp_path)])
    printed = capsys.readouterr().out
    rows = {line[:26].strip(): line[26:].split() for line in printed.splitlines()}
    adamw, *refused, grass_, int8 = rows["step, link and update, s"]
    assert float(adamw) > float(grass_) > float(int8) > 0
    assert set(refused) == {"-"}
    assert float(rows["of these in files"][0]) > 0
    assert "rates of an even one" in printed
    assert f"{tmp_path} has " in printed
    main([*shown, "--offload"])
    assert "in files" not in capsys.readouterr().out
    main([*shown, "--offload-path", str(tmp_path / "later")])
    assert "later is not there yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (None, ["--offload"], "No such file"),
        ("{", ["--offload"], "does not hold the rates of a machine"),
        (json.dumps({"host_rate": 1}), ["--offload"], "does not hold the rates of a machine"),
        ("[]", [], "--machine predicts offloaded steps: add --offload"),
    ],
)
def test_machines_that_are_refused(
    content: str | None, flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit):
        main(["--model", "1m", "--rank", "16", "--seq", "64", "--machine", str(path), *flags])
    assert message in capsys.readouterr().err
