r"""Finetune a pretrained model with AdamW, Grass or adapters (LoRA, DoRA, rsLoRA), by transformers' Trainer.

Sequence classification: a task of GLUE by name, or any dataset with a column or two of text and one of labels:

    python scripts/finetune.py classify --model roberta-base --task sst2 --lr 3e-5 --out runs/sst2
    python scripts/finetune.py classify --model roberta-base --dataset csv --data-files train=reviews.csv \
        --columns title body --label stars --out runs/reviews

Instruction tuning on Alpaca-style examples (instruction, input, output), from the hub or a JSON file; only responses
are trained on:

    python scripts/finetune.py instruct --model meta-llama/Llama-3.2-1B --dataset tatsu-lab/alpaca --packed \
        --method lora --rank 16 --lr 2e-4 --bf16 --out runs/alpaca
    python scripts/finetune.py instruct --model meta-llama/Llama-3.2-1B --dataset json \
        --data-files train=examples.json --out runs/own

A model larger than the device, whose layers visit it one by one:

    python scripts/finetune.py instruct --model mistralai/Mistral-7B-v0.3 --dataset tatsu-lab/alpaca --packed \
        --dtype bfloat16 --rank 256 --active-dtype float32 --offload --stream --lr 5e-5 --out runs/mistral

Without a network, `--model tiny` makes a tokenizer and a small model on the spot, and the data are by default the
docstrings of the Python standard library: which package is this one from? What does this function do?

    python scripts/finetune.py classify --model tiny --lr 2e-3 --out runs/docstrings
    python scripts/finetune.py instruct --model tiny --lr 2e-3 --packed --out runs/signatures

Every other flag is one of transformers.TrainingArguments: --num-train-epochs 3, --per-device-train-batch-size 16,
--gradient-accumulation-steps 4, --gradient-checkpointing, --warmup-steps 100, --resume-from-checkpoint DIR, ...
By default it saves and evaluates after each epoch and keeps the newest checkpoint; --save-steps 100 and
--eval-steps 100 do so by steps, and --save-total-limit 3 keeps more. A directory that holds a run is refused.
SIGTERM or Ctrl-C ends the run with a checkpoint after the current step. A run that goes on from a checkpoint needs its
method, its --rank in compact mode and its data, and has its hyperparameters, whatever --lr, --scale and the like say.
The run's directory gets the model for from_pretrained (LoRA: the adapters), metrics.csv and eval_results.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from transformers import HfArgumentParser, PreTrainedModel, TrainingArguments

from grass.command_line import ArgumentParser, ShortErrors
from grass.memory import state_bytes
from training.data.docstrings import docstrings, docstrings_of_signatures
from training.finetune import classification, instructions
from training.finetune.checkpoints import Checkpoints, check, described
from training.finetune.run import ADAPTERS, METHODS, DatasetSource, FinetuneTask, make_trainer, write_log
from training.finetune.tiny import tiny_decoder, tiny_encoder, train_tokenizer
from training.run.flags import add_optimizer_flags, from_flags, optimizer_from_flags, split_and_path
from training.run.setup import write_setup
from training.run.signals import GracefulStop

DEFAULTS = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "logging_steps": 10,
    "dataloader_pin_memory": torch.cuda.is_available(),
}
"""Where ours differ from those of TrainingArguments."""


OURS = {
    "learning_rate": "--lr",
    "adam_beta1": "--betas",
    "adam_beta2": "--betas",
    "output_dir": "--out",
    "metric_for_best_model": "the task, which has a metric of its own",
    "greater_is_better": "the task, which has a metric of its own",
}
"""Fields of TrainingArguments that flags of this script set."""
UNREAD = {
    ("classify", "without --dataset"): ("packed", "columns", "label"),
    ("classify", "with --dataset"): ("packed", "task"),
    ("instruct", "without --dataset"): ("task", "columns", "label"),
    ("instruct", "with --dataset"): ("task", "columns", "label"),
}
"""Data flags that are not read, by what is finetuned for and whose data."""
ADAPTER_RANK = 16
"""``--rank`` of adapters."""


class TrainerFlags(ShortErrors, HfArgumentParser):  # type: ignore[misc]
    """The flags of ``TrainingArguments``."""


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser()
    args, rest = parser.parse_known_args(argv)
    try:
        check_read(args, parser)
        arguments = training_arguments(args, rest)
        if not args.overwrite:
            check_new(args.out, arguments)
        name = "grass" if args.method == "grass" else "adamw"
        if args.method in ADAPTERS and args.rank is None:
            args.rank = ADAPTER_RANK
        optimizer = optimizer_from_flags(args, name)
        task = (instruct if args.kind == "instruct" else classify)(args, arguments)
        run, stop = described(task.dataset["train"], args.method, optimizer), GracefulStop()
        if arguments.resume_from_checkpoint:
            check(arguments.resume_from_checkpoint, run)
        checkpoints = Checkpoints(run, stop)
        trainer = make_trainer(task, args.method, optimizer, arguments, streams=args.stream, callbacks=[checkpoints])
    except ValueError as error:
        parser.error(str(error))
    with stop:
        trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    if checkpoints.stopped:
        if trainer.is_world_process_zero():
            step, steps = trainer.state.global_step, trainer.state.max_steps
            flag = f"--resume-from-checkpoint {args.out / f'checkpoint-{step}'}"
            print(f"Stopped at step {step} of {steps}: the same command with {flag} goes on from there")
        return
    metrics = trainer.evaluate()
    if args.kind == "instruct":
        metrics["eval_perplexity"] = instructions.perplexity(metrics["eval_loss"])
    trainer.save_model(args.out)
    if not trainer.is_world_process_zero():
        return
    trainer.save_metrics("eval", metrics)
    write_log(trainer.state.log_history, args.out / "metrics.csv")
    known = {"method": args.method, "rank": optimizer.rank} if args.method in ADAPTERS else {}
    write_setup(args.out, trainer.model, trainer.optimizer, **known)
    print(", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("eval_")))
    print("state {:,} bytes, on the host {:,}".format(*state_bytes(trainer.optimizer.optimizer)))


def training_arguments(args: argparse.Namespace, flags: list[str]) -> TrainingArguments:
    """``Trainer``'s own flags over our defaults. ``--save-steps`` and ``--eval-steps`` save and evaluate by steps.

    Raises:
        ValueError: one of them beside a strategy that has no steps, or a flag that another one here stands for.
    """
    ours, given = dict(DEFAULTS), _values(flags)
    if taken := next((name for name in OURS if name in given), None):
        raise ValueError(f"--{taken.replace('_', '-')} is set by {OURS[taken]}")
    for name in ("save", "eval"):
        if f"{name}_steps" in given:
            ours[f"{name}_strategy"] = "steps"
            if given.get(f"{name}_strategy", "steps") != "steps":
                raise ValueError(f"--{name}-steps does nothing with --{name}-strategy {given[f'{name}_strategy']}")
    defaults = [text for name, value in ours.items() for text in (f"--{name}", str(value))]
    own = ["--output_dir", str(args.out), "--seed", str(args.seed)]
    arguments: TrainingArguments = TrainerFlags(TrainingArguments).parse_args_into_dataclasses(
        [*own, *defaults, *flags]
    )[0]
    return arguments


def _values(flags: list[str]) -> dict[str, str]:
    """The values of flags, ``--save-steps 5`` or ``--save_steps=5``, by the names of ``TrainingArguments``."""
    words = [part for flag in flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    return {a.lstrip("-").replace("-", "_"): b for a, b in pairwise([*words, ""]) if a.startswith("--")}


def check_new(out: Path, arguments: TrainingArguments) -> None:
    """Refuse to train over the results of an earlier run.

    Raises:
        ValueError: the directory holds a log, a model or checkpoints, and the run does not go on from one of these.
    """
    results = [*out.glob("metrics.csv"), *out.glob("*.safetensors"), *out.glob("checkpoint-*")]
    if results and not arguments.resume_from_checkpoint:
        raise ValueError(
            f"{out} already holds a run: choose another --out, go on from a checkpoint by --resume-from-checkpoint "
            f"{out}/checkpoint-N, or replace it by --overwrite"
        )


def check_read(args: argparse.Namespace, parser: ArgumentParser) -> None:
    """Refuse data flags that what is finetuned for does not read.

    Raises:
        ValueError: for the first of them that is given.
    """
    data = "without --dataset" if args.dataset is None else "with --dataset"
    unread = UNREAD[args.kind, data] + (("subset", "data_files") if args.dataset is None else ())
    if name := next((name for name in unread if getattr(args, name) != parser.get_default(name)), None):
        raise ValueError(f"--{name.replace('_', '-')} does nothing with {args.kind} {data}")


def classify(args: argparse.Namespace, arguments: TrainingArguments) -> FinetuneTask:
    """The classification task that the flags describe."""
    if args.dataset is None:
        task, dataset = classification.load_task(args.task)
    else:
        task, dataset = classification.own_task(dataset_source(args), args.columns, args.label)
    names = classification.class_names(dataset, task.label) or ["score"]
    path = pretrained(args, arguments, partial(tiny_encoder, num_labels=len(names)))
    return classification.finetune_task(path, task, dataset, max_length=args.max_length, dtype=args.dtype)


def instruct(args: argparse.Namespace, arguments: TrainingArguments) -> FinetuneTask:
    """The instruction task that the flags describe."""
    dataset = docstrings_of_signatures() if args.dataset is None else dataset_source(args).load()
    path = pretrained(args, arguments, tiny_decoder)
    return instructions.finetune_task(path, dataset, max_length=args.max_length, packed=args.packed, dtype=args.dtype)


def pretrained(
    args: argparse.Namespace, arguments: TrainingArguments, make_tiny: Callable[..., PreTrainedModel]
) -> str:
    """What to load model and tokenizer from: ``--model``, or the run's own base model made by its first process."""
    if args.model != "tiny":
        return str(args.model)
    path = str(args.out / "base")
    with arguments.main_process_first(local=False):
        if arguments.process_index == 0:
            tokenizer = train_tokenizer(item.text for item in docstrings())
            tokenizer.save_pretrained(path)
            make_tiny(tokenizer, max_length=args.max_length, seed=args.seed).save_pretrained(path)
    return path


def dataset_source(args: argparse.Namespace) -> DatasetSource:
    source: DatasetSource = from_flags(DatasetSource, args, data_files=dict(args.data_files) or None)
    return source


def argument_parser() -> ArgumentParser:
    parser = ArgumentParser(__doc__, allow_abbrev=False)
    parser.add_argument("kind", choices=("classify", "instruct"), help="what to finetune for")
    add = parser.add_argument_group("run").add_argument
    add("--out", type=Path, required=True, help="directory of the run")
    add("--overwrite", action="store_true", help="train anew although --out holds a run")
    add("--model", required=True, help="name or directory for from_pretrained, or tiny")
    add("--seed", type=int, default=0, help="of new weights, the order of the data and the row selection")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add_data_flags(parser.add_argument_group("data").add_argument)
    add = parser.add_argument_group("method").add_argument
    add("--stream", action="store_true", help="grass: layers stay on the host and visit the device one by one")
    add(
        "--method",
        choices=METHODS,
        default="grass",
        help=f"what to train with; --rank of adapters is an integer, by default {ADAPTER_RANK}",
    )
    add_optimizer_flags(add)
    return parser


def add_data_flags(add) -> None:  # type: ignore[no-untyped-def]
    add("--task", choices=classification.TASKS, default="docstrings", help="classify: docstrings, or one of GLUE")
    add("--dataset", help="on the Hugging Face hub, or json, csv, parquet, ... with --data-files")
    add("--subset", help="configuration of the dataset")
    add("--data-files", nargs="+", type=split_and_path, default=(), metavar="SPLIT=GLOB")
    add("--held-out", type=float, default=0.05, help="fraction to evaluate on where there is no validation split")
    add("--columns", nargs="+", default=("text",), help="classify: one or two columns of text")
    add("--label", default="label", help="classify: the column of classes, or of numbers for regression")
    add("--max-length", type=int, default=128, help="tokens per example; instruct --packed: per row of examples")
    add("--packed", action="store_true", help="instruct: several examples in one row, kept apart by position_ids")


if __name__ == "__main__":
    main()
