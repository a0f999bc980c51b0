"""Plans of models that ``fully_shard`` divides, against torch's tracker and against plans of one device."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from grass.memory import METHODS, Architecture, Setting, plan
from grass.memory.__main__ import main
from grass.memory.planner import planned_methods
from tests.memory.architectures import KINDS, LLAMA_7B, LLAMA_13B

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "memory_sharded.py"
HALF = {"active_dtype": torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["60m", "--layers", "2", "--gpus", "2", "--rank", "64"], id="60m"),
        pytest.param(["13b", "--layers", "3", "--gpus", "8"], id="13b"),
        pytest.param(["1b", "--layers", "4", "--gpus", "4"], id="1b", marks=pytest.mark.soak),
    ],
)
def test_plan_equals_what_the_tracker_counts(tmp_path, arguments):
    """Within 5%: of a block's backward the plan knows the ends, not each of its temporaries."""
    csv = tmp_path / "sharded.csv"
    subprocess.run([sys.executable, SCRIPT, "--csv", csv, "--models", *arguments], check=True)
    tracked = pd.read_csv(csv)
    assert list(tracked.method) == ["AdamW", "AdamW float32", "Grass"]
    assert tracked.tracked_over_planned.between(0.95, 1.05).all(), tracked.to_string()


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize("method", planned_methods(Setting(shards=2, **HALF)))
def test_more_devices_never_hold_more(kind, method):
    model = Architecture.from_config(KINDS[kind])
    chunks = 0 if model.scales_logits else 128
    peaks = [
        plan(method, model, Setting(rank=32, seq_len=256, chunk_tokens=chunks, shards=shards, **HALF)).peak
        for shards in (2, 4, 16)
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_two_devices_hold_half_each_but_for_indices():
    alone, divided = (plan("Grass", LLAMA_7B, Setting(shards=shards, **HALF)) for shards in (1, 2))
    assert divided.weights == alone.weights / 2
    assert divided.gradients == alone.gradients / 2
    indices = 8 * 2 * 256 * LLAMA_7B.layers * len(LLAMA_7B.linears)
    assert divided.active_rows == (alone.active_rows - indices) / 2 + indices
    assert divided.activations == alone.activations
    assert alone.gathered == 0 < divided.gathered


def cells(table, label):
    """The cells of a row of the command's table."""
    return re.search(rf"^{label} +(.*)$", table, re.M).group(1).split()


@pytest.mark.slow
def test_the_command_plans_several_devices(capsys):
    budget = ["--tokens", "26B", "--tflops", "100"]
    main(["--model", "13b", "--gpus", "8", "--fsdp", "--gpu", "24GB", *budget])
    divided = capsys.readouterr().out
    assert "active rows bfloat16" in divided
    assert "rank of adapters" not in divided, "LoRA has no plan here"
    assert "Grass: linear layers train at" in divided
    assert re.search(r"^ +AdamW  AdamW float32  Grass dense +Grass$", divided, re.M)
    expected = [
        plan(method, LLAMA_13B, Setting(shards=8, **HALF)).total
        for method in ("AdamW", "AdamW float32", "Grass dense", "Grass")
    ]
    assert cells(divided, "total") == [f"{size / 1e9:,.2f}" for size in expected]
    main(["--model", "13b", "--gpus", "8", *budget])
    replicas = capsys.readouterr().out
    main(["--model", "13b", *budget])
    alone = capsys.readouterr().out
    assert cells(replicas, "total") == cells(alone, "total")
    days = [float(cells(text, "days.*TFLOP/s")[0]) for text in (alone, replicas)]
    assert days[1] == pytest.approx(days[0] / 8, rel=0.01)  # three digits are printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fsdp"], "--fsdp divides the model among several devices: add --gpus"),
        (["--gpus", "0"], "Invalid --gpus 0: must be >= 1"),
        (["--gpus", "2", "--sweep", "2x10"], "leave out --sweep and --machine"),
        (["--gpus", "2", "--fsdp", "--active-dtype", "float32"], "Invalid --active-dtype=torch.float32"),
        (["--gpus", "2", "--fsdp", "--offload"], "Invalid --offload=True"),
        (
            ["--gpus", "2", "--fsdp", "--moment-dtype", "8bit"],
            "Invalid --moment-dtype=8bit with --fsdp --gpus=2: only float32 or bfloat16",
        ),
        (["--gpus", "2", "--fsdp", "--selection", "top_r"], "Invalid --selection=top_r"),
    ],
)
def test_what_has_no_plan_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["--model", "60m", *arguments])
    assert message in capsys.readouterr().err


def test_methods_without_a_plan_are_named():
    others = METHODS.keys() - set(planned_methods(Setting(shards=2, **HALF)))
    for method in others:
        with pytest.raises(ValueError, match=r"available: AdamW, AdamW float32, Grass dense, Grass$"):
            plan(method, LLAMA_7B, Setting(shards=2, **HALF))
