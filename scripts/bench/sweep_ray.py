"""Time two short trials under Ray Tune and under grass.sweep, from the first call to the table.

    pip install "ray[tune]==2.60.0"
    python scripts/bench/sweep_ray.py --csv benchmarks/sweep_ray.csv        # about a minute

Both have two places for trials. A trial sleeps ``--steps`` times ``--seconds``, and imports what trials of Grass do.
``overhead`` is the rest of the time: processes, imports, and what the engine itself takes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from sweep import sleep

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

import grass.sweep
from grass.command_line import ArgumentParser

TRIALS = 2


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="of a trial")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a step")
    parser.add_argument("--csv", type=Path, default=Path("runs/sweep_ray.csv"))
    args = parser.parse_args()
    trial = partial(sleep, steps=args.steps, seconds=args.seconds)
    rows = []
    for engine, run in (("grass.sweep", pooled), ("Ray Tune", under_ray)):
        with tempfile.TemporaryDirectory() as out:
            start = time.perf_counter()
            assert run(trial, args.steps, out) == [1 / args.steps] * TRIALS
            seconds = time.perf_counter() - start
        rows.append({"engine": engine, "seconds": seconds, "overhead": seconds - args.steps * args.seconds})
    result = pd.DataFrame(rows)
    print(result.to_string(index=False, float_format="%.1f"))
    write(result, args.csv, trials=TRIALS, steps=args.steps, step_seconds=args.seconds)


def pooled(trial: Any, steps: int, out: str) -> list[float]:
    """The last losses of the trials by ``grass.sweep.run``."""
    table = grass.sweep.run(
        trial, {"trial": list(range(TRIALS))}, out=out, steps=steps, devices=[f"cpu:{i}" for i in range(TRIALS)]
    )
    return [row["loss"] for row in table]


def under_ray(trial: Any, steps: int, out: str) -> list[float]:
    """The same by Ray Tune."""
    import ray
    from ray import tune

    paths = {"PYTHONPATH": str(Path(__file__).parent)}
    ray.init(num_cpus=TRIALS, include_dashboard=False, runtime_env={"env_vars": paths}, log_to_driver=False)
    trainable = tune.with_resources(grass.sweep.for_ray(trial), {"cpu": 1})
    tuner = tune.Tuner(
        trainable,
        param_space={"trial": tune.grid_search(list(range(TRIALS)))},
        run_config=tune.RunConfig(storage_path=out, verbose=0),
    )
    losses = [result.metrics["loss"] for result in tuner.fit()]
    ray.shutdown()
    return losses


if __name__ == "__main__":
    main()
