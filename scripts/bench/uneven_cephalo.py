"""Divide Cephalo's published example by our rule, on paper: its measured times, no GPU.

    python scripts/bench/uneven_cephalo.py

The example is that of https://github.com/benson-guo/cephalo (README.md): GPT of 2.7 billion parameters, 64 sequences of
512 tokens, on two L4, an A6000 and a P40. Its file data/model_latencies.json has lines that were fitted to measured
times of one layer in float16; example/gpt_2.7b.json has the plan that its optimizer made. ``step`` is 32 times the
layer of the slowest rank, by these lines. Ours has equal numbers of micro-batches on all ranks. Memory and
communication are left out, because the published figures of memory are for sharded states.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))
from provenance import write

from grass.command_line import ArgumentParser
from grass.machine.division import divide, divide_evenly
from grass.machine.profile import Profile

BATCH, LAYERS = 64, 32
GPUS = ("L4", "L4", "A6000", "P40")
LINES = {
    "L4": ((7.415036, 1.181504), (10.946160, 4.842824)),
    "A6000": ((2.835478, 0.664214), (4.221010, 2.404014)),
    "P40": ((15.637328, 4.132932), (28.016862, 1.877118)),
}
"""Milliseconds of a layer's forward and backward: for each sequence, and once."""
CEPHALO = ((13, 1), (12, 2), (34, 1), (5, 1))
"""Sequences of each GPU and in how many micro-batches it takes them."""


def profile(gpu: str) -> Profile:
    """Seconds of all layers; a straight line needs two sizes."""
    return Profile(gpu, {size: sum(a * size + b for a, b in LINES[gpu]) * LAYERS / 1e3 for size in (1, BATCH)}, BATCH)


def row(plan: str, sizes: list[int], seconds: list[float]) -> dict[str, object]:
    each = {f"seconds_{i}": second for i, second in enumerate(seconds)}
    return {"plan": plan, "sizes": "+".join(map(str, sizes)), "step": max(seconds), **each}


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parents[2] / "benchmarks" / "uneven_cephalo.csv")
    args = parser.parse_args()
    profiles = [profile(gpu) for gpu in GPUS]
    theirs = [n * p.predict(size // n) for p, (size, n) in zip(profiles, CEPHALO, strict=True)]
    ours, even = divide(profiles, BATCH), divide_evenly(profiles, BATCH)
    assert even is not None
    rows = [row("Cephalo", [size for size, _ in CEPHALO], theirs)]
    for name, found in {"ours": ours, "even": even}.items():
        rows.append(row(name, [found.micro_batches * size for size in found.sizes], list(found.seconds)))
    result = pd.DataFrame(rows).assign(gpus="+".join(GPUS))
    result["times_even"] = even.step / result.step
    print(result.to_string(index=False, float_format="%.3f"))
    write(result, args.csv)


if __name__ == "__main__":
    main()
