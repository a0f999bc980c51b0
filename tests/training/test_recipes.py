"""Each recipe fits the GPU that its name promises, and runs."""

import os
import re
import runpy
import subprocess
import sys

import pandas as pd
import pytest
import torch
from page_tables.setups import RECIPES, flags, planned
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from grass.memory import Architecture, Setting, parse_bytes, plan
from grass.memory.llama import LlamaShape, llama_config
from tests.training.runs import PRETRAIN
from training.run.flags import optimizer_from_flags

ROOT = PRETRAIN.parents[1]
pretrain = runpy.run_path(str(PRETRAIN))


def planned_and_said(recipe, page):
    """A recipe's arguments, its plan, which its comment states, and its row in a table."""
    args = pretrain["argument_parser"]().parse_args(flags(recipe))
    plan, _ = planned(args)
    expected = f"# Planned: {plan.total / 1e9:.1f} GB on the device, {plan.on_host / 1e9:.1f} GB on the host.\n"
    assert expected in recipe.read_text()
    return args, plan, next(line for line in (ROOT / page).read_text().splitlines() if f"`{recipe.name}`" in line)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_fits_the_gpu_of_its_name(recipe):
    args = pretrain["argument_parser"]().parse_args(flags(recipe))
    name = r"pretrain_(?:llama|qwen3)_(\d+b(?:_a3b)?)_(\d+gb)(?:_offload(?:_adamw)?)?"
    size, memory = re.fullmatch(name, recipe.stem).groups()
    size = size.replace("_", "-")
    assert (args.model, args.dataset, args.dtype) == (size, "allenai/c4", "bf16")
    assert optimizer_from_flags(args, args.optimizer).compact == ("adamw" not in recipe.stem)
    assert args.stream == (size in ("30b", "30b-a3b", "70b"))
    assert args.offload == ("offload" in recipe.stem or args.stream)
    assert (args.checkpointing, args.seq_len) == (True, 2048)
    assert planned(args)[0].total <= parse_bytes(memory)


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "offload" in path.stem], ids=lambda path: path.stem)
def test_says_what_is_planned(recipe):
    args, plan, row = planned_and_said(recipe, "docs/offload.md")
    memory = re.search(r"_(\d+)gb_", recipe.stem)[1]
    assert row.endswith(f"| {memory} GB | {plan.on_host / 1e9:.0f} GB |")
    if args.optimizer == "grass":
        assert f"rank {args.rank} |" in row


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "--stream" in path.read_text()], ids=lambda p: p.stem)
def test_streaming_recipes_say_what_is_planned(recipe):
    args, plan, row = planned_and_said(recipe, "docs/streaming.md")
    assert row.endswith(f"| rank {args.rank} | {plan.total / 1e9:.0f} GB | {plan.on_host / 1e9:.0f} GB |")
    args.stream, args.host_activations, args.cache = False, False, 0
    memory = re.search(r"_(\d+gb)", recipe.stem)[1]
    assert planned(args)[0].total > parse_bytes(memory)


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "offload" in path.stem], ids=lambda path: path.stem)
def test_does_not_fit_without_offload(recipe):
    args = pretrain["argument_parser"]().parse_args(flags(recipe))
    args.offload = args.offload_masters = False
    memory = re.search(r"_(\d+gb)_", recipe.stem)[1]
    assert planned(args)[0].total > parse_bytes(memory)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_builds_at_full_size(recipe):
    """Model and optimizer of the recipe's own command line, on tensors without contents: what the planner counts."""
    args = pretrain["argument_parser"]().parse_args(flags(recipe))
    args.stream, args.host_activations, args.cache = False, False, 0  # which do not change what is built
    plan, config = planned(args)
    options = optimizer_from_flags(args, args.optimizer)
    with FakeTensorMode():
        model, optimizer = pretrain["build"](args, config, options, torch.device("cpu"))
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert held == pytest.approx(plan.weights + plan.active_rows, abs=10_000)
    trained = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    assert trained == plan.gradients


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, marks=[] if "70b" in path.stem else pytest.mark.slow) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_smoke(recipe, tmp_path, capsys):
    arguments = [*flags(recipe, "--smoke"), "--out", str(tmp_path), "--device", "cpu"]
    pretrain["main"](arguments)
    printed = capsys.readouterr().out
    evaluated, rate = re.search(r"^eval loss ([\d.]+), ([\d,]+) tokens/s$", printed, re.MULTILINE).groups()
    flops, peak = re.search(r"^(\S+) model TFLOP/s; peak memory ([\d,]+) bytes$", printed, re.MULTILINE).groups()
    assert float(flops) > 0
    assert int(rate.replace(",", "")) > 0
    assert int(peak.replace(",", "")) > 50e6
    log = pd.read_csv(tmp_path / "metrics.csv")
    assert log["loss"].notna().sum() == 4
    assert log["loss"].iloc[-1] < log["loss"].iloc[0] - 0.1
    assert (log["tokens_per_second"] > 0).all()
    assert float(evaluated) == pytest.approx(log["eval_loss"].iloc[-1], abs=1e-4)
    assert list((tmp_path / "checkpoints").glob("step-*/manifest.json"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    ids = torch.randint(256, (1, 32))
    assert 4 < model(input_ids=ids, labels=ids).loss < 8
    pretrain["main"]([*arguments, "--resume"])
    assert "Resumed at step 4" in capsys.readouterr().out


def test_the_recipes_are_there():
    names = {path.stem.removeprefix("pretrain_").removeprefix("llama_") for path in RECIPES}
    resident = {"13b_40gb", "13b_24gb", "7b_24gb", "7b_12gb", "1b_8gb"}
    offloaded = {
        "13b_24gb_offload",
        "13b_40gb_offload",
        "7b_24gb_offload",
        "7b_32gb_offload_adamw",
        "1b_8gb_offload_adamw",
    }
    assert names == resident | offloaded | {"30b_24gb", "70b_24gb", "qwen3_30b_a3b_80gb"}


FINETUNE = PRETRAIN.parent / "recipes/finetune_7b_8gb.sh"


def test_finetuning_fits_the_gpu_of_its_name():
    done = subprocess.run(
        [str(FINETUNE)], env={**os.environ, "PYTHON": "echo"}, capture_output=True, text=True, check=True
    )
    script, *rest = done.stdout.split()
    assert script == "scripts/finetune.py"
    args, others = runpy.run_path(str(PRETRAIN.parent / "finetune.py"))["argument_parser"]().parse_known_args(rest)
    batch = int(others[others.index("--per-device-train-batch-size") + 1])
    shape = LlamaShape(4096, 14336, 32, 32, 8)  # of Mistral 7B
    config = llama_config(shape, vocab_size=32_768, max_seq_len=args.max_length)
    setting = Setting(
        rank=args.rank,
        active_dtype=getattr(torch, args.active_dtype),
        dtype=getattr(torch, args.dtype),
        batch_size=batch,
        seq_len=args.max_length,
        chunk_tokens=0,
        offload=args.offload,
        stream=args.stream,
        host_activations=True,
    )
    planned = plan("Grass", Architecture.from_config(config), setting)
    assert planned.total <= parse_bytes("8gb")
    expected = f"# Planned: {planned.total / 1e9:.1f} GB on the device, {planned.on_host / 1e9:.1f} GB on the host.\n"
    assert expected in FINETUNE.read_text()
    row = next(line for line in (ROOT / "docs/streaming.md").read_text().splitlines() if f"`{FINETUNE.name}`" in line)
    assert row.endswith(f"| rank {args.rank} | {planned.total / 1e9:.0f} GB | {planned.on_host / 1e9:.0f} GB |")


@pytest.mark.slow
def test_finetuning_smoke(tmp_path):
    done = subprocess.run(
        [str(FINETUNE), "--smoke", "--out", str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (pd.read_csv(tmp_path / "metrics.csv")["loss"].dropna() > 0).all()
    assert (tmp_path / "model.safetensors").exists()
