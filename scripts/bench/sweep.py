"""Time grass.sweep on stand-in devices: trials that sleep, on one device and on two, and what the pool adds to them.

    python scripts/bench/sweep.py --csv benchmarks/sweep.csv              # about eight minutes
    python scripts/bench/sweep.py --steps 2 --seconds 0.1                 # seconds: checks that it runs

Each trial of ``--trials`` takes ``--steps`` steps of ``--seconds`` seconds. ``seconds`` is the time of the whole sweep,
``times_one`` that of one device divided by it. ``overhead`` is what a trial takes beyond its steps: the start of a
process, the imports and its end.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass.sweep
from grass.command_line import ArgumentParser


def sleep(trial: int, *, steps: int, seconds: float, folder: Path, device: str) -> Iterator[tuple[int, float]]:
    for step in range(1, steps + 1):
        time.sleep(seconds)
        yield step, 1 / step


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of a trial")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step")
    parser.add_argument("--csv", type=Path, default=Path("runs/sweep.csv"))
    args = parser.parse_args()
    trial = partial(sleep, steps=args.steps, seconds=args.seconds)
    took: dict[int, float] = {}
    for devices in (1, 2):
        with tempfile.TemporaryDirectory() as out:
            names = [f"cpu:{i}" for i in range(devices)]
            start = time.perf_counter()
            grass.sweep.run(trial, {"trial": list(range(args.trials))}, out=out, steps=args.steps, devices=names)
            took[devices] = time.perf_counter() - start
    result = pd.DataFrame(
        {
            "devices": devices,
            "seconds": seconds,
            "times_one": took[1] / seconds,
            "overhead": seconds * devices / args.trials - args.steps * args.seconds,
        }
        for devices, seconds in took.items()
    )
    print(result.to_string(index=False, float_format="%.2f"))
    write(result, args.csv, trials=args.trials, steps=args.steps, step_seconds=args.seconds)


if __name__ == "__main__":
    main()
