r"""What training a model takes, by category and method, and what fits a GPU.

    python -m grass.memory --model 13b --rank 256 --seq 2048 --batch 1 --gpu 40GB
    python -m grass.memory --model Qwen/Qwen2.5-7B --moments 8bit --gpu 24GiB
    python -m grass.memory --model path/to/config.json --no-checkpointing --chunked-loss 0

Nothing is allocated: what a block saves is counted on tensors without contents, the rest follows in closed form; all is
checked against torch's memory tracker. The numbers are those of one process, without the CUDA context (about half a GB)
and without what other processes hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from grass.memory.models import load_architecture
from grass.memory.setting import MOMENTS, Setting
from grass.memory.table import render
from grass.memory.units import UNITS, parse_bytes
from grass.moments import POLICIES

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that the arguments ask for."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    try:
        setting = Setting(
            rank=args.rank,
            dim=args.dim,
            policy=args.policy,
            moments=args.moments,
            bank_dtype=getattr(torch, args.bank_dtype),
            dtype=getattr(torch, args.dtype),
            active_dtype=getattr(torch, args.active_dtype),
            batch_size=args.batch,
            seq_len=args.seq,
            checkpointing=args.checkpointing,
            chunk_tokens=args.chunked_loss,
            slack=args.slack,
        )
        print(render(args.model, load_architecture(args.model), setting, args.gpu))
    except (ImportError, ValueError) as error:
        parser.error(str(error))


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""

    class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
        pass

    parser = argparse.ArgumentParser("grass-memory", description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--model", required=True, help="13b, 7b, 1b, ...; or a Hugging Face model, directory or config.json")
    add("--gpu", type=_size, help=f"memory to fit, with a unit: {', '.join(UNITS)}; GB are 10^9 bytes, GiB 2^30")
    add("--rank", type=_number, default=256, help="an integer, or a fraction of the dimension")
    add("--seq", type=int, default=2048, help="tokens per sequence")
    add("--batch", type=int, default=1, help="sequences per forward")
    add("--dim", type=int, choices=(0, 1), default=1, help="select rows or columns")
    add("--policy", choices=tuple(POLICIES), default="bank", help="moments at a refresh")
    add("--moments", choices=tuple(MOMENTS), default="float32", help="of Grass")
    add("--bank-dtype", choices=("float32", "bfloat16"), default="float32", help="of the bank in host memory")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and arithmetic")
    add("--active-dtype", choices=DTYPES, default="float32", help="of active rows and adapters")
    checkpointing: Any = argparse.BooleanOptionalAction
    add("--checkpointing", action=checkpointing, default=True, help="of activations")
    add("--chunked-loss", type=int, default=256, metavar="TOKENS", help="logits of so many tokens at a time; 0: of all")
    add("--slack", type=float, default=0.02, help="allocator slack, a fraction of the peak: an assumption")
    return parser


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _number(text: str) -> int | float:
    return float(text) if set(text) & set(".e") else int(text)


if __name__ == "__main__":
    main()
