"""Make the base model that all finetuning cells start from.

    python scripts/study/base.py                     # runs/study/base, in about 5 minutes of one core

A LLaMA of the ``1m`` shape with a BPE tokenizer of its own, pretrained by AdamW on the Python standard library
without the packages that the finetuning tasks are made from. Every call makes the same model
if the versions of Python and torch are the same.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from grass.command_line import ArgumentParser

sys.path.append(str(Path(__file__).parents[1]))
from training.data.blocks import DataConfig
from training.data.corpus import split_by_file, standard_library, text_files
from training.data.docstrings import PACKAGES
from training.data.loading import load_data
from training.finetune.tiny import tiny_decoder, train_tokenizer
from training.run.config import TrainConfig
from training.run.loop import Trainer
from training.run.optimizers import OptimizerConfig, build_optimizer

BASE = Path("runs/study/base")
STEPS = 2000
LR = 0.002


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--out", type=Path, default=BASE)
    parser.add_argument("--steps", type=int, default=STEPS, help="of 8 sequences of 256 tokens")
    parser.add_argument("--float32", action="store_true", help="for a CPU without instructions for bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    print(ensure_base(args.out, steps=args.steps, autocast=not args.float32))


def ensure_base(path: Path, *, steps: int = STEPS, files: Sequence[str] | None = None, autocast: bool = True) -> Path:
    """The directory of the base model, made now if it is not there.

    A second process that wants it meanwhile waits for the first. It appears complete or not at all.

    Args:
        path: for ``from_pretrained``.
        steps: to train, if it is to be made.
        files: patterns of the files to train on; by default those of :func:`other_files`.
        autocast: compute in bfloat16, as for the losses that are committed.

    Raises:
        SystemExit: a signal stopped the training.
    """
    with _locked(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            unfinished = path.with_name(f"{path.name}.incomplete")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            _pretrain(unfinished, steps, other_files() if files is None else files, autocast)
            os.replace(unfinished, path)
    return path


def other_files() -> list[str]:
    """Patterns of the standard library's files outside the packages of the finetuning tasks."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (document.name for document in standard_library())
    return [glob.escape(str(root / name)) for name in names if Path(name).parts[0] not in PACKAGES]


def _pretrain(out: Path, steps: int, files: Sequence[str], autocast: bool) -> None:
    train, _ = split_by_file(text_files(files))
    tokenizer = train_tokenizer(document.text for document in train)
    tokenizer.save_pretrained(out)
    data = load_data(DataConfig(tokenizer=str(out), text_files=files))
    model = tiny_decoder(tokenizer, max_length=data.train.seq_len)
    interval = max(1, steps // 10)
    config = TrainConfig(
        out=out / "log", steps=steps, warmup=interval, autocast=autocast, eval_every=steps, log_every=interval
    )
    result = Trainer(model, build_optimizer(model, OptimizerConfig(name="adamw", lr=LR)), data, config).run()
    if result.step < steps:
        raise SystemExit("Stopped before the base model was trained")
    model.save_pretrained(out)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
