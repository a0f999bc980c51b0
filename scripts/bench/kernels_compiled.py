"""Compile every Triton kernel for GPUs that are not here: registers, spills, shared memory and occupancy.

    python scripts/bench/kernels_compiled.py --csv benchmarks/kernels_compiled.csv       # about ten minutes of one core
    python scripts/bench/kernels_compiled.py --gpus sm_90

One row for each kernel, type and GPU, over all layouts in which it is launched: the most registers a thread, bytes
that spill and bytes of shared memory, and the least occupancy, which is the share of a processor's warps that run at a
time. It follows from registers, shared memory and the makers' tables (``tests/kernels/compile_all.py``). Nothing is
executed, so that this says nothing about time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))
import triton
from provenance import write

from grass.command_line import ArgumentParser
from tests.kernels.compile_all import GPUS

ROOT = Path(__file__).parents[2]
DTYPES = ("bfloat16", "float32")


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--gpus", nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--csv", type=Path, default=Path("runs/kernels_compiled.csv"))
    args = parser.parse_args()
    table = pd.concat([rows(gpu, compiled(gpu)) for gpu in args.gpus], ignore_index=True)
    print(table.to_string(index=False))
    write(table, args.csv, digits=3, triton=triton.__version__)


def compiled(gpu: str) -> str:
    """What the compiler reports: one line a launch. A process compiles for one GPU."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_INTERPRET", "GRASS"))}
    command = [sys.executable, "-m", "tests.kernels.compile_all", gpu, *DTYPES]
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def rows(gpu: str, report: str) -> pd.DataFrame:
    """A row for each kernel and type: bfloat16 if one of its tensors has it."""
    launches = pd.DataFrame(_launch(line) for line in report.splitlines() if "REG=" in line)
    launches["spilled_bytes"] = launches.STACK + launches.LOCAL
    grouped = launches.groupby(["kernel", "dtype"], sort=True)
    table = grouped.agg(
        layouts=("REG", "size"),
        registers=("REG", "max"),
        spilled_bytes=("spilled_bytes", "max"),
        shared_bytes=("SHARED", "max"),
        warps=("WARPS", "max"),
        occupancy=("OCCUPANCY", "min"),
    )
    return table.reset_index().assign(gpu=gpu)[["gpu", *table.index.names, *table.columns]]


def _launch(line: str) -> dict[str, object]:
    name, types = re.findall(r"(\w+) \[([^]]*)\]", line)[0]
    numbers = {
        key: float(value) if "." in value else int(value) for key, value in re.findall(r"([A-Z]+)=([\d.]+)", line)
    }
    dtype = "bfloat16" if "*bf16" in types else "float32"
    return {"kernel": name.removeprefix("_").removesuffix("_kernel"), "dtype": dtype, **numbers}


if __name__ == "__main__":
    main()
