r"""What training a model takes, by category and method, and what fits a GPU.

    python -m grass.memory --model 13b --rank 256 --seq 2048 --batch 1 --gpu 40GB
    python -m grass.memory --model 7b --rank 0.05 --lora-rank 64
    python -m grass.memory --model Qwen/Qwen2.5-7B --moment-dtype 8bit --gpu 24GiB
    python -m grass.memory --model 13b --offload --machine machine.json --gpu 40GB
    python -m grass.memory --model 13b --offload-path /fast/disk
    python -m grass.memory --model 70b --stream --gpu 24GB --host 192GB
    python -m grass.memory --model 13b --tokens 26B --tflops 400
    python -m grass.memory --model 13b --gpus 8 --fsdp --gpu 24GB
    python -m grass.memory --model 13b --stream --sweep 6x300 --devices 2 --tflops 200 --host 192GB
    python -m grass.memory --model 13b --machine a.json --machine b.json --batch 64
    python -m grass.memory --model path/to/config.json --no-checkpointing --chunked-loss 0

Nothing is allocated: what a block saves is counted on tensors without contents, the rest follows in closed form; all is
checked against torch's memory tracker. The numbers are those of one process, also with --gpus, without the CUDA
context (about half a GB) and without what other processes hold.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grass.command_line import ArgumentParser, number
from grass.machine.rates import Machine
from grass.memory import uneven_table
from grass.memory.architecture import Architecture
from grass.memory.models import load_architecture
from grass.memory.setting import MOMENTS, Setting
from grass.memory.sweep import Sweep
from grass.memory.table import Report
from grass.memory.uneven import read_rank
from grass.memory.units import UNITS, count, format_bytes, size
from grass.options import POLICIES
from grass.selection.rules import available_rules

FLAGS = {
    "rank": "--rank",
    "explore": "--explore",
    "seq_len": "--seq",
    "batch_size": "--batch",
    "chunk_tokens": "--chunked-loss",
}
"""Flags by the field of :class:`Setting` that they set; their defaults are lowered to what a model allows."""

FLAGS_IN_ERRORS = FLAGS | {
    "shards": "--fsdp --gpus",
    "active_dtype": "--active-dtype",
    "offload": "--offload",
    "cache": "--cache",
    "host_activations": "--host-activations",
    "stream": "--stream",
    "moment_dtype": "--moment-dtype",
    "selection": "--selection",
}
"""Flags by the fields that errors name."""

BATCH = 64
"""Sequences of a step of several machines."""

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that the arguments ask for."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    given = {field: getattr(args, field) for field in FLAGS if getattr(args, field) is not None}
    try:
        _check_flags(args)
        setting = Setting(
            **given,
            lora_rank=args.lora_rank,
            selection=args.selection,
            dim=args.dim,
            state_policy=args.state_policy,
            moment_dtype=args.moment_dtype,
            bank_dtype=getattr(torch, args.bank_dtype or "float32"),
            dtype=getattr(torch, args.dtype),
            active_dtype=getattr(torch, args.active_dtype or (args.dtype if args.fsdp else "float32")),
            checkpointing=args.checkpointing,
            offload=_offloads(args),
            masters=args.masters,
            files=args.offload_path is not None,
            stream=args.stream,
            cache=args.cache or 0,
            host_activations=args.host_activations,
            shards=args.gpus if args.fsdp else 1,
            slack=args.slack,
        )
        model = load_architecture(args.model)
        setting, reasons = setting.lowered(model, FLAGS.keys() - given.keys())
        for field, reason in reasons.items():
            print(f"{FLAGS[field]} {getattr(setting, field)} instead of {getattr(Setting, field)}: {reason}")
        if len(args.machine) > 1:
            print(_uneven(args, model, setting))
            return
        if args.machine and not setting.offload:
            raise ValueError("--machine predicts offloaded steps: add --offload or --stream")
        machine = Machine.read(args.machine[0]) if args.machine else None
        _check_times(args, setting, machine)
        report = Report(
            name=args.model,
            model=model,
            setting=setting,
            gpu=args.gpu,
            host=args.host,
            machine=machine,
            tokens=args.tokens,
            tflops=args.tflops,
            gpus=args.gpus,
            sweep=None if args.sweep is None else Sweep.parse(args.sweep, 2 if args.devices is None else args.devices),
        )
        print(report)
        if args.offload_path is not None:
            print(_room(args.offload_path))
    except (ImportError, OSError, ValueError) as error:
        parser.error(_with_flags(str(error)))


def argument_parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(__doc__, prog="grass-memory")
    add = parser.add_argument
    add("--model", required=True, help="13b, 7b, 1b, ...; or a Hugging Face model, directory or config.json")
    units = f"{', '.join(UNITS)}; GB are 10^9 bytes, GiB 2^30"
    add("--gpu", type=size, help=f"memory with a unit ({units}), to say what fits it and the largest rank and batch")
    add(
        "--rank", type=number, help="an integer, or a fraction of the dimension; default: 256, or the most there can be"
    )
    add("--lora-rank", type=int, default=16, help="of LoRA and QLoRA")
    add("--explore", type=number, help="other rows or columns that Grass moves in each step; default: as many as rank")
    add("--selection", choices=available_rules(), default="uniform", help="Grass's rule")
    add(
        "--seq",
        dest="seq_len",
        type=int,
        metavar="TOKENS",
        help="tokens per sequence; default: 2048, or the model's most",
    )
    add(
        "--batch",
        dest="batch_size",
        type=int,
        metavar="SEQUENCES",
        help=f"per forward, default: 1; of all --machine together, default: {BATCH}",
    )
    add("--dim", type=int, choices=(0, 1), default=1, help="select rows or columns")
    add("--state-policy", "--policy", choices=tuple(POLICIES), default="keep", help="moments at a refresh")
    add("--moment-dtype", "--moments", choices=tuple(MOMENTS), default="float32", help="of Grass")
    add("--bank-dtype", choices=("float32", "bfloat16"), help="of --state-policy bank in host memory; default: float32")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and arithmetic")
    add("--active-dtype", choices=DTYPES, help="of active rows and adapters; default: float32, or --dtype with --fsdp")
    checkpointing: Any = argparse.BooleanOptionalAction
    add("--checkpointing", action=checkpointing, default=True, help="of activations")
    add(
        "--chunked-loss",
        dest="chunk_tokens",
        type=int,
        metavar="TOKENS",
        help="logits of so many tokens at a time, 0: of all; default: 256, or 0 where the loss cannot be chunked",
    )
    add("--offload", action="store_true", help="AdamW and Grass: moments in host memory, stepped there")
    add(
        "--offload-path",
        type=Path,
        metavar="DIRECTORY",
        help="--offload with moments, bank and copies of weights in files there",
    )
    add("--masters", action="store_true", help="--offload with float32 masters of what is stepped whole")
    add("--stream", action="store_true", help="--offload, and blocks visit the device one by one")
    add("--cache", type=size, metavar="SIZE", help="of blocks that stay on the device with --stream")
    add("--host-activations", action="store_true", help="inputs of blocks wait on the host with --stream")
    add("--gpus", type=int, default=1, help="that train together, each --batch sequences of its own: replicas (DDP)")
    add("--fsdp", action="store_true", help="fully_shard divides every block, and what is left, among --gpus")
    add("--host", type=size, metavar="SIZE", help="host memory to fit, with --gpu")
    add(
        "--machine",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="rates of python -m grass.offload --out: how long steps take; several, also of "
        "grass.distributed.deal(profile=...): how to divide --batch among them",
    )
    add("--tokens", type=count, metavar="NUMBER", help="how many days so many tokens take, as in 26B; with --tflops")
    add(
        "--tflops",
        type=float,
        help="10^12 operations a second that training reaches, with --tokens or --sweep",
    )
    add("--sweep", metavar="TRIALSxSTEPS", help="hours of so many trials; with --tflops, or --stream and --machine")
    add("--devices", type=int, help="of the --sweep; default: 2")
    add("--slack", type=float, default=0.02, help="allocator slack, a fraction of the peak: an assumption")
    return parser


def _check_flags(args: argparse.Namespace) -> None:
    """What flags need of each other."""
    if args.gpus < 1:
        raise ValueError(f"Invalid --gpus {args.gpus}: must be >= 1")
    if args.fsdp and args.gpus == 1:
        raise ValueError("--fsdp divides the model among several devices: add --gpus")
    if args.gpus > 1 and (args.sweep is not None or args.machine):
        raise ValueError("--gpus says how many like devices train one model: leave out --sweep and --machine")
    if args.gpus > 1 and args.stream:
        raise ValueError("--stream plans one device: leave out --gpus (unlike devices: several --machine)")
    if args.host is not None and not (_offloads(args) or args.machine):
        raise ValueError("--host is the memory that --offload and --stream take: add one of them")
    if args.host is not None and args.gpu is None and args.sweep is None and not args.machine:
        raise ValueError("--host is compared with what fits a --gpu: add it")
    if args.devices is not None and args.sweep is None:
        raise ValueError("--devices are those of a --sweep: add it, or say --gpus")
    if args.bank_dtype is not None and args.state_policy != "bank":
        raise ValueError(f"--bank-dtype is of --state-policy bank, not of {args.state_policy}")


def _offloads(args: argparse.Namespace) -> bool:
    """Whether the state lies on the host: other flags ask for that, too."""
    return args.offload or args.stream or args.masters or args.offload_path is not None


def _uneven(args: argparse.Namespace, model: Architecture, setting: Setting) -> str:
    """How several machines divide a batch."""
    if setting.offload or args.sweep is not None or args.tokens is not None:
        raise ValueError(
            "With several --machine the plan says what each of them streams: leave out --offload, --offload-path, "
            "--masters, --stream, --sweep and --tokens"
        )
    ranks = [read_rank(path, model, setting, args.gpu, args.host) for path in args.machine]
    return uneven_table.render(args.model, ranks, BATCH if args.batch_size is None else args.batch_size)


def _check_times(args: argparse.Namespace, setting: Setting, machine: Machine | None) -> None:
    """What days and the hours of a sweep need."""
    if args.tflops is not None and not 0 < args.tflops < math.inf:
        raise ValueError(f"Invalid --tflops {args.tflops}: must be > 0")
    if (args.tokens is None) != (args.tflops is None) and (args.sweep is None or args.tokens is not None):
        raise ValueError("--tokens and --tflops go together: days need both")
    if args.sweep is not None and args.tflops is None and not (setting.stream and machine is not None):
        raise ValueError("--sweep needs how long steps take: add --tflops, or --stream with --machine")


def _room(directory: Path) -> str:
    """How much space a directory has, if it is there."""
    if not directory.is_dir():
        return f"{directory} is not there yet: its free space is not known."
    return f"{directory} has {format_bytes(shutil.disk_usage(directory).free)} free."


def _with_flags(message: str) -> str:
    """An error's message with the flags in place of the fields that they set."""
    return re.sub(r"\b(\w+)=", lambda match: f"{FLAGS_IN_ERRORS.get(match[1], match[1])}=", message)


if __name__ == "__main__":
    main()
