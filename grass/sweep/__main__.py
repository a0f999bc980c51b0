"""Find the two learning rates of a causal language model: of its projected weights, and of all others.

    python -m grass.sweep --model DIRECTORY --data text.txt --scratch
    python -m grass.sweep --model gpt2 --data a.txt b.txt --rank 0.125 --steps 500 --devices cuda:0 cuda:1

It trains short complete runs, each on a device of its own, begins with --lr and scale="auto", and halves and doubles
both rates until the best pair is inside its bracket: half and twice of either rate are worse, or level within 0.002.
The rate of the projected weights is lr * scale. After each round it says how many runs there are and which is best; at
the end it prints the table of all runs and the lines for your script, and draws lr.png and curves.png. The same command
resumes it after an interruption.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grass.command_line import ArgumentParser, share
from grass.sweep.bracket import Point, best_point, next_points
from grass.sweep.grid import Kind
from grass.sweep.language import LanguageModel
from grass.sweep.plot import plot_curves, plot_rates
from grass.sweep.runner import run
from grass.sweep.stopping import Behind

SCRATCH_LR, PRETRAINED_LR = 4e-3, 1e-4
Table = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
    """Search, and print what was found."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    try:
        trial = trial_of(args)
        trial.windows()  # an error here is one for all trials
        stop = None if args.behind is None else Behind(args.behind)
        start = args.lr or (SCRATCH_LR if args.scratch else PRETRAINED_LR)
        table, best = search(trial, start, args.out, args.devices, stop)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"\nStopped; the same command goes on with what {args.out} holds", file=sys.stderr)
        sys.exit(130)
    print(render(table, best))
    try:
        plot_rates(table, best, args.out / "lr.png")
        kind = Kind(trial, args.steps, args.out)
        files = [kind.place({name: row[name] for name in ("lr", "scale")}).path("jsonl") for row in table]
        plot_curves(files, args.out / "curves.png")
        print(f"Pictures: {args.out / 'lr.png'}, {args.out / 'curves.png'}")
    except ImportError as error:
        print(error, file=sys.stderr)
    print(f"\n{trial.lines(best['lr'], best['scale'])}")


def argument_parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(__doc__, prog="python -m grass.sweep")
    add = parser.add_argument
    add("--model", required=True, help="a directory or a name that transformers loads")
    add("--data", required=True, nargs="+", metavar="FILE", help="text; the last tenth is held out")
    add("--out", type=Path, default=Path("runs/sweep"), help="journals, logs and lr.png")
    add("--scratch", action="store_true", help="random weights from the configuration instead of pretrained ones")
    add("--lr", type=float, help=f"to begin with; default: {PRETRAINED_LR:g}, with --scratch {SCRATCH_LR:g}")
    add("--rank", type=share, default=0.25, help="selected columns, a fraction")
    add("--explore", type=share, help="explored columns, a fraction; default: that of the mode")
    add("--dense", action="store_true", help="dense mode instead of compact mode")
    add("--steps", type=int, default=270, help="of each run")
    add("--batch-size", type=int, default=8, help="sequences per step")
    add("--seq-len", type=int, default=256, help="tokens per sequence")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and arithmetic")
    add("--seed", type=int, default=0, help="of first weights, batches and selection")
    add("--devices", nargs="+", metavar="NAME", help="one run on each at a time; default: all accelerators, or the CPU")
    add("--behind", type=float, metavar="MARGIN", help="stop runs that are behind by this share of the loss, as 0.05")
    return parser


def trial_of(args: Any) -> LanguageModel:
    """The run that the arguments describe.

    Raises:
        ValueError: one is out of range.
    """
    for name in ("steps", "batch_size", "seq_len"):
        if getattr(args, name) < 1:
            raise ValueError(f"Invalid --{name.replace('_', '-')} {getattr(args, name)}: must be >= 1")
    if not 0 < args.rank <= 1:
        raise ValueError(f"Invalid --rank {args.rank}: must be a fraction in (0, 1]")
    if args.explore is not None and not 0 <= args.explore <= 1:
        raise ValueError(f"Invalid --explore {args.explore}: must be a fraction in [0, 1]")
    if args.lr is not None and not 0 < args.lr < math.inf:
        raise ValueError(f"Invalid --lr {args.lr}: must be a finite number > 0")
    return LanguageModel(
        model=args.model,
        data=tuple(args.data),
        steps=args.steps,
        rank=args.rank,
        explore=args.explore,
        dense=args.dense,
        scratch=args.scratch,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        dtype=args.dtype,
        seed=args.seed,
    )


def search(
    trial: LanguageModel, lr: float, out: Path, devices: Sequence[str] | None, stop: Behind | None
) -> tuple[Table, dict[str, Any]]:
    """Run trials until the best is inside its bracket: the table of all, and the best one's row.

    Args:
        trial: what is run.
        lr: to begin with, for both rates.
        out: where the sweep keeps its files.
        devices: as in :func:`grass.sweep.run`.
        stop: as in :func:`grass.sweep.run`.

    Raises:
        RuntimeError: a run failed by another cause than its rates.
        ValueError: there are no best rates near ``lr``.
    """
    points: list[Point] = []
    losses: dict[Point, float] = {}
    table: Table = []
    while new := next_points(losses):
        points += new
        grid = [_rates(point, lr, trial.auto_scale()) for point in points]
        table = run(trial, grid, out=out, steps=trial.steps, devices=devices, stop=stop, retry=True)
        for row in table:
            if row["end"] in ("error", "out of memory"):
                raise RuntimeError(f"lr={row['lr']:g}, scale={row['scale']:g}: {row['message']} (logs are in {out})")
        losses = {point: _loss(row) for point, row in zip(points, table, strict=True)}
        best = table[points.index(best_point(losses))]
        rates = f"lr={best['lr']:.4g}, scale={best['scale']:.4g}"
        print(f"{len(table)} runs, best so far: loss {best['loss']:.4f} at {rates}", file=sys.stderr, flush=True)
    return table, best


def render(table: Table, best: dict[str, Any]) -> str:
    """The table, best first, with a star at the best."""
    lines = [f"  {'lr':>10} {'scale':>10} {'lr * scale':>10} {'loss':>8}  end"]
    for row in sorted(table, key=lambda row: (_loss(row), row["loss"])):
        rates = f"{row['lr']:10.4g} {row['scale']:10.4g} {row['lr'] * row['scale']:10.4g}"
        lines.append(f"{'*' if row is best else ' '} {rates} {row['loss']:8.4f}  {row['end']}")
    return "\n".join(lines)


def _rates(point: Point, lr: float, scale: float) -> dict[str, float]:
    """The settings at a point: the first coordinate is that of all other weights, the second of the projected ones."""
    others, projected = point
    return {"lr": lr * 2.0**others, "scale": scale * 2.0 ** (projected - others)}


def _loss(row: dict[str, Any]) -> float:
    """The loss of a run that came to its end."""
    return float(row["loss"]) if row["end"] == "done" else math.inf


if __name__ == "__main__":
    main()
