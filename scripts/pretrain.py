r"""Pretrain a LLaMA from scratch.

The embedded corpus (the Python standard library, as bytes) needs no download:

    python scripts/pretrain.py --model 1m --steps 500 --out runs/adamw --optimizer adamw --lr 3e-3
    python scripts/pretrain.py --model 1m --steps 500 --out runs/grass --optimizer grass --lr 3e-3

Stop it with Ctrl-C or SIGTERM, or lose the machine: the same command with --resume goes on from the newest checkpoint.
A stopped run saves one after its current step; torchrun waits 30 seconds for that, or its --shutdown-timeout.

Own text files, or any dataset of the Hugging Face hub as a stream:

    python scripts/pretrain.py --text-files 'books/**/*.txt' --eval-files 'held-out/*.txt' --out runs/books
    python scripts/pretrain.py --model 60m --dataset allenai/c4 --subset en --tokenizer t5-base --seq-len 256 \
        --batch-size 64 --accumulate 8 --steps 10000 --dtype bf16 --out runs/c4
    python scripts/pretrain.py --dataset json --data-files train=a.jsonl validation=b.jsonl --tokenizer t5-base \
        --out runs/json

With the optimizer's state in host memory; a resumed run may add or drop --offload:

    python scripts/pretrain.py --model 60m --offload --out runs/offload

A model larger than the device, whose layers visit it one by one; a resumed run may add or drop --stream too:

    python scripts/pretrain.py --model 60m --offload --stream --out runs/stream

On several processes, by DDP or, with --fsdp, by FSDP2; batches are per process:

    torchrun --nproc-per-node 2 scripts/pretrain.py --model 60m --out runs/ddp
    torchrun --nproc-per-node 2 --max-restarts 3 scripts/pretrain.py --fsdp --resume --out runs/fsdp

On processes of unlike speed, which are measured; or sequences of each in a batch. A stream cannot be dealt:

    torchrun --nproc-per-node 2 scripts/pretrain.py --model 60m --deal auto --out runs/uneven
    torchrun --nproc-per-node 2 scripts/pretrain.py --model 60m --deal 11 5 --out runs/uneven

A run on files goes on on any number of processes, if a step has as many sequences:

    python scripts/pretrain.py --model 60m --batch-size 16 --out runs/uneven --resume

The run's directory holds metrics.csv, TensorBoard logs, checkpoints, and at the end the model for from_pretrained.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

import grass
from grass.command_line import ArgumentParser
from grass.compact_mode.int8 import plain_state_dict
from grass.memory.llama import LLAMA_SHAPES, llama_config
from grass.memory.units import size
from training.data.blocks import DataConfig
from training.data.loading import load_data
from training.run.checkpoint import CheckpointStore, export_model
from training.run.config import TrainConfig
from training.run.flags import add_optimizer_flags, from_flags, optimizer_from_flags, share, split_and_path
from training.run.loop import Result, Trainer
from training.run.models import build_llama
from training.run.optimizers import OPTIMIZERS, OptimizerConfig, build_optimizer, convert
from training.run.processes import Processes, launched_processes, shard_module, whole_weights
from training.run.throughput import model_flops_per_token, peak_flops, peak_memory

CHANGEABLE = {"out", "resume", "steps", "save_every", "eval_every", "log_every", "keep", "device"}
CHANGEABLE |= {"offload", "offload_masters", "offload_path", "stream", "cache", "host_activations", "checkpointing"}
"""Flags that may differ between a run and its continuation."""
OF_FILES = {"batch_size", "accumulate", "deal"}
"""Likewise, where data are no stream: only the sequences of a step have to be as many, on any number of processes."""


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser()
    args = parser.parse_args(argv)
    with launched_processes(args.device) as processes:
        run(parser, args, processes)


def run(parser: ArgumentParser, args: argparse.Namespace, processes: Processes) -> None:
    try:
        warmup = min(100, args.steps // 10) if args.warmup is None else args.warmup
        train_config = from_flags(TrainConfig, args, autocast=args.dtype == "autocast", warmup=warmup)
        shard = processes.rank, processes.size
        data_config = from_flags(DataConfig, args, data_files=dict(args.data_files) or None, shard=shard)
        optimizer_config = optimizer_from_flags(args, args.optimizer)
        checkpoints = checkpoint_store(args, optimizer_config)
        check_flags(args, processes)
        data = load_data(data_config)
        config = llama_config(args.model, vocab_size=data.vocab_size, max_seq_len=args.seq_len)
        model, optimizer = build(args, config, optimizer_config, processes.device)
        changeable = CHANGEABLE | (set() if args.dataset else OF_FILES)
        settings = {name: value for name, value in vars(args).items() if name not in changeable}
        trainer = Trainer(model, optimizer, data, train_config, checkpoints, settings, processes)
        if args.resume and trainer.resume() and processes.is_main:
            print(f"Resumed at step {trainer.step}")
        if trainer.step > args.steps:
            raise ValueError(f"Invalid --steps {args.steps}: {args.out} is at step {trainer.step} already")
    except ValueError as error:
        parser.error(str(error))
    result, weights = trainer.run(), whole_weights(model)
    if processes.is_main:
        report(result, trainer, args)
        if trainer.step == args.steps:
            export_model(model, args.out / "model", weights or plain_state_dict(model))


def build(
    args: argparse.Namespace, config: PretrainedConfig, optimizer: OptimizerConfig, device: torch.device
) -> tuple[PreTrainedModel, Optimizer]:
    """The model on its device, sharded if that is asked for, and its optimizer."""
    model = build_llama(
        config,
        seed=args.seed,
        dtype=torch.bfloat16 if args.dtype == "bf16" else torch.float32,
        device="cpu" if args.stream else device,
        checkpointing=args.checkpointing and not args.stream,  # streamed layers always are
        chunk_tokens=args.chunked_loss,
        convert=partial(prepare_layer, args, optimizer),  # always: sharded and int8 models begin as others do
    )
    if args.fsdp:
        shard_module(model)
    built = build_optimizer(model, optimizer)
    if args.stream:
        stays = {"offload_activations": args.host_activations, "offload": grass.Offload(path=args.offload_path)}
        model.streamed = grass.stream(model, device, cache=args.cache, **stays)  # type: ignore[assignment]
    return model, built


def prepare_layer(args: argparse.Namespace, optimizer: OptimizerConfig, layer: nn.Module, number: int) -> None:
    """Convert and shard a decoder layer before the next one is made: no device has to hold the whole model."""
    if optimizer.compact:
        convert(layer, number, config=optimizer)
    if args.fsdp:
        shard_module(layer)


def check_flags(args: argparse.Namespace, processes: Processes) -> None:
    if args.step_in_backward and args.mode == "compact":
        raise ValueError("--step-in-backward takes dense mode, --mode dense: compact mode forms no full gradients")
    if args.fsdp and not (dist.is_initialized() or dist.is_torchelastic_launched()):
        raise ValueError("--fsdp shards the model over processes: torchrun --nproc-per-node N scripts/pretrain.py ...")
    if args.fsdp and args.moment_dtype == "8bit":
        raise ValueError("--moment-dtype 8bit cannot be sharded: its blocks run over rows. Take bfloat16 with --fsdp")
    if args.stream and (args.fsdp or processes.size > 1):
        raise ValueError("--stream is for one process: FSDP2's CPUOffloadPolicy streams over several")
    if not args.stream and (args.cache or args.host_activations):
        raise ValueError("--cache and --host-activations need --stream")


def report(result: Result, trainer: Trainer, args: argparse.Namespace) -> None:
    if result.step < args.steps:
        print(f"Stopped at step {result.step} of {args.steps}: the same command with --resume goes on from there")
    else:
        print(f"eval loss {result.eval_loss:.4f}, {result.tokens_per_second:,.0f} tokens/s")
        print(f"state {result.state_bytes.device:,} bytes, on the host {result.state_bytes.host:,}")
    if args.stream:
        print(trainer.model.streamed)
    flops = result.tokens_per_second * model_flops_per_token(trainer.model, args.seq_len)
    peak = peak_flops(trainer.device)
    share = f", MFU {flops / peak:.1%} of {peak / 1e12:.0f} TFLOP/s" if peak else ""
    print(f"{flops / 1e12:.3g} model TFLOP/s{share}; peak memory {peak_memory(trainer.device):,} bytes")


def checkpoint_store(args: argparse.Namespace, optimizer: OptimizerConfig) -> CheckpointStore | None:
    """Where to save checkpoints; ``None`` for optimizers whose state cannot be loaded safely."""
    store = CheckpointStore(args.out / "checkpoints", keep=args.keep)
    if not args.resume and (store.paths() or (args.out / "model").exists()):
        raise ValueError(f"{args.out} already holds a run: continue it with --resume or choose another --out")
    if not optimizer.resumable:
        reason = f"the state of {optimizer.name} holds pickled objects, which torch.load(weights_only=True) refuses"
        if args.resume:
            raise ValueError(f"Cannot --resume: {reason}")
        warnings.warn(f"No checkpoints will be saved, only the final model: {reason}", stacklevel=2)
        return None
    return store


def argument_parser() -> ArgumentParser:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument_group("run").add_argument
    add("--out", type=Path, required=True, help="directory of the run")
    add("--resume", action="store_true", help="go on from the newest complete checkpoint in --out, if there is one")
    add("--model", type=str.lower, choices=LLAMA_SHAPES, default="1m", help="size")
    add("--seed", type=int, default=0, help="of the initial weights, the order of the data and the row selection")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--fsdp", action="store_true", help="under torchrun: shard the model (FSDP2) instead of replicating it (DDP)")
    add("--stream", action="store_true", help="layers stay on the host and visit the device one by one")
    add("--cache", type=size, default=0, metavar="SIZE", help="--stream: of layers that stay on the device")
    add("--host-activations", action="store_true", help="--stream: inputs of layers wait on the host for backward")
    add("--dtype", choices=("fp32", "bf16", "autocast"), default="fp32", help="bf16: also the weights")
    add_training_flags(parser.add_argument_group("training").add_argument)
    add_data_flags(parser.add_argument_group("data; by default the embedded corpus").add_argument)
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=OPTIMIZERS, default="grass", help="which")
    add_optimizer_flags(add)
    return parser


def add_training_flags(add: Any) -> None:
    add("--steps", type=int, default=1000, help="optimizer steps")
    add(
        "--warmup",
        type=int,
        help="steps of warm-up, before a cosine to --final-lr; default: a tenth of the run as it began, up to 100",
    )
    add(
        "--final-lr",
        type=float,
        default=0.1,
        help="learning rate that the cosine ends at, after the last step, as a share of the peak",
    )
    add("--accumulate", type=int, default=1, help="batches per step")
    add("--checkpointing", action="store_true", help="keep layers' inputs alone and run each forward again in backward")
    add("--chunked-loss", type=int, default=0, metavar="TOKENS", help="logits of so many tokens at a time; 0: of all")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0 is off")
    add(
        "--step-in-backward",
        action="store_true",
        help="grass, dense mode, one process: step each weight in backward, free its gradient; --clip is per weight",
    )
    add("--eval-every", type=int, default=100, help="steps between evaluations")
    add("--log-every", type=int, default=10, help="steps between logged rows")
    add("--save-every", type=int, default=500, help="steps between checkpoints; 0 saves only on a stop and at the end")
    add("--keep", type=int, default=2, help="checkpoints to keep")


def add_data_flags(add: Any) -> None:
    add("--batch-size", type=int, default=8, help="sequences per batch")
    add(
        "--deal",
        type=share,
        nargs="+",
        default=(),
        metavar="SEQUENCES",
        help="per batch of each process, for --batch-size; or auto: measured, of as many sequences in a step",
    )
    add("--seq-len", type=int, default=256, help="tokens per sequence")
    add("--eval-blocks", type=int, default=64, help="held-out sequences to evaluate on")
    add("--tokenizer", help="name or directory for AutoTokenizer; bytes if not given")
    add("--text-files", nargs="+", default=(), metavar="GLOB", help="5%% of the files are held out, or --eval-files")
    add("--eval-files", nargs="+", default=(), metavar="GLOB")
    add("--dataset", help="on the Hugging Face hub, or json, text, parquet, ... with --data-files; read as a stream")
    add("--subset", help="configuration of the dataset")
    add("--split", default="train", help="training split")
    add("--eval-split", default="validation", help="held-out split")
    add("--data-files", nargs="+", type=split_and_path, default=(), metavar="SPLIT=GLOB")
    add("--text-column", default="text", help="column that holds the text")


if __name__ == "__main__":
    main()
