"""The setups of ``scripts/recipes/``: what the planner says of each recipe's own flags."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from grass.memory import Architecture, Plan, Setting, plan
from grass.memory.duration import days
from grass.memory.llama import LLAMA_SHAPES, llama_config
from grass.memory.models import load_architecture
from grass.selection.exploration import auto_scale
from page_tables.markdown import table

SCRIPTS = Path(__file__).parents[1]
RECIPES = sorted((SCRIPTS / "recipes").glob("pretrain_*.sh"))
T5_VOCABULARY = 32_100
BILLION, TFLOPS = 1e9, 100.0
"""What the column of days is for: tokens, and 10^12 floating-point operations a second that training reaches."""


def flags(recipe: Path, *arguments: str) -> list[str]:
    """What a recipe gives to ``scripts/pretrain.py``."""
    environment = {**os.environ, "PYTHON": "echo"}
    done = subprocess.run([str(recipe), *arguments], env=environment, capture_output=True, text=True, check=True)
    script, *rest = done.stdout.split()
    assert script == "scripts/pretrain.py", done.stdout
    return rest


@cache
def arguments() -> dict[Path, argparse.Namespace]:
    """What ``scripts/pretrain.py`` makes of each recipe's flags."""
    parser = runpy.run_path(str(SCRIPTS / "pretrain.py"))["argument_parser"]()
    return {recipe: parser.parse_args(flags(recipe)) for recipe in RECIPES}


def setting_of(args: argparse.Namespace) -> Setting:
    """The planner's setting for arguments of ``scripts/pretrain.py``."""
    return Setting(
        rank=args.rank if args.optimizer == "grass" else 1,
        explore=args.explore,
        selection=args.selection,
        dim=args.dim,
        state_policy=args.state_policy,
        moment_dtype=args.moment_dtype,
        active_dtype=getattr(torch, args.active_dtype or "float32"),
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        checkpointing=args.checkpointing,
        chunk_tokens=args.chunked_loss,
        offload=args.offload,
        masters=args.offload_masters,
        stream=args.stream,
        cache=args.cache,
        host_activations=args.host_activations,
    )


def method_of(args: argparse.Namespace) -> str:
    """The planner's name of the method."""
    return "AdamW" if args.optimizer == "adamw" else "Grass int8" if args.weights else "Grass"


def config_of(args: argparse.Namespace) -> Any:
    """The configuration of the model."""
    return llama_config(args.model, vocab_size=T5_VOCABULARY, max_seq_len=args.seq_len)


def planned(args: argparse.Namespace) -> tuple[Plan, Any]:
    """The plan for a recipe's arguments, and the model's configuration."""
    config = config_of(args)
    return plan(method_of(args), Architecture.from_config(config), setting_of(args)), config


def setups() -> str:
    """A row for each recipe: what it runs on, rank, rate, memory and time."""
    rows = []
    for recipe, args in arguments().items():
        config, setting, method = config_of(args), setting_of(args), method_of(args)
        model = Architecture.from_config(config)
        found = plan(method, model, setting)
        gpu = re.findall(r"_(\d+)gb", recipe.stem)[0]
        grass = args.optimizer == "grass"
        columns, hidden = (args.rank, args.explore), config.hidden_size
        factor = auto_scale(hidden, *columns) if grass else 1.0
        rows.append(
            [
                args.model.upper(),
                f"{gpu} GB",
                f"`{recipe.name}`",
                f"{columns[0]:,} + {columns[1]} of {hidden:,}" if grass else "AdamW, all",
                f"{args.lr * factor:.2g}" if factor != 1 else f"{args.lr:g}",
                f"{found.total / 1e9:.0f} GB",
                f"{found.on_host / 1e9:.0f} GB" if found.on_host else "",
                f"{days(method, model, setting, BILLION, TFLOPS):.1f}",
            ]
        )
    order = sorted(rows, key=lambda row: (float(row[0].split("B")[0]), int(row[1].split()[0])))
    heads = ["LLaMA", "GPU", "recipe", "r + q", "rate of linear layers", "planned", "host memory", "days"]
    return table(heads, order)


def planned_gpus() -> str:
    """What the planner gives for each of several GPUs which FSDP2 divides a model among, and the days that all take."""
    methods = [("AdamW float32", 1 / 8), ("AdamW", 1 / 8), ("Grass", 1 / 8), ("Grass", 1 / 16)]
    rates = {args.model: args.lr for args in arguments().values()}
    lines = []
    for size in ("7b", "13b", "30b", "70b"):
        model, hidden = load_architecture(size), LLAMA_SHAPES[size].hidden_size
        for gpus in (2, 4, 8):
            settings = [Setting(rank=share, active_dtype=torch.bfloat16, shards=gpus) for _, share in methods]
            totals = [plan(m, model, s).total / 1e9 for (m, _), s in zip(methods, settings, strict=True)]
            took = days("Grass", model, settings[2], BILLION, TFLOPS) / gpus
            rank = hidden // 8
            columns = f"{rank:,} + {rank:,} of {hidden:,}"
            rate = f"{rates[size] * auto_scale(hidden, rank, rank):.2g}"
            lines.append([size.upper(), str(gpus), *(f"{x:.0f} GB" for x in totals), columns, rate, f"{took:.1f}"])
    names = ["AdamW, float32 parameters and moments", "AdamW, all in bfloat16"]
    grass = ["Grass, r = q = n/8", "Grass, r = q = n/16"]
    return table(["LLaMA", "GPUs", *names, *grass, "r + q at n/8", "rate of linear layers", "days"], lines)
