"""What the kernel benchmarks share: timing, the ceilings of the machine, the table.

A case is timed by calls on several sets of operands that together exceed the cache, which are queued behind a large
product, so that neither launches nor cached operands count. Its rate is divided by that of a large copy measured in the
same run. With ``--smoke`` every case runs once, tiny, in Triton's interpreter: times are then meaningless.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SMOKE = "--smoke" in sys.argv
if SMOKE:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import pandas as pd  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

sys.path.append(str(Path(__file__).parents[2]))
from provenance import commit  # noqa: E402

from grass.command_line import ArgumentParser  # noqa: E402

DEVICE = "cpu" if SMOKE else "cuda"
SHAPES = [(7, 16)] if SMOKE else [(4096, 4096), (11008, 4096), (4096, 11008)]
"""Weights of LLaMA 7b."""
RANKS = [4] if SMOKE else [256, 1024]
TOKENS = 24 if SMOKE else 8192
CACHE = 0 if SMOKE else 200_000_000
"""Bytes that the operands of one round of calls exceed; an H200 caches 60 MB."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table.

    Attributes:
        kernel: its name.
        case: what tells it from the kernel's other cases.
        make: makes one set of operands and returns the call to time on it.
        bytes: read and written by the floor of the kernel's docstring.
        target: share of the ceiling aimed at on an H200; 0 is none.
    """

    kernel: str
    case: str
    make: Callable[[], Callable[[], object]]
    bytes: int
    target: float = 0.0


def step_device() -> str:
    """Where whole training steps run; with ``--smoke`` on the tests' stand-in, or on the CPU if that lacks tools."""
    if not SMOKE:
        return DEVICE
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.accelerator import standin

    if (reason := standin.why_not()) is not None:
        print(f"On the CPU: {reason}")
        return DEVICE
    standin.install()
    return "standin"


def operands(cases: Iterable[tuple[int, int]] = SHAPES) -> Iterator[tuple[tuple[int, int], int]]:
    """Shapes and ranks."""
    for shape in cases:
        for rank in RANKS:
            yield shape, rank


def picked(size: int, rank: int) -> torch.Tensor:
    """Sorted distinct indices."""
    return torch.randperm(size)[:rank].sort().values.to(DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random values: zeros are faster than real data."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def seconds(calls: list[Callable[[], object]], repeats: int = 5) -> float:
    """Median seconds of one call."""
    for call in calls:
        call()
    if SMOKE:
        start = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        _keep_busy()
        begin.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(times)


@functools.cache
def _factor() -> torch.Tensor:
    return torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)


def _keep_busy() -> None:
    """Queue products of some 15 ms, during which the host queues what is timed."""
    for _ in range(10):
        _factor() @ _factor()


def ceiling_of_bytes() -> float:
    """Bytes per second of a large copy, read and written."""
    copied = randn(1 << (10 if SMOKE else 30))
    into = torch.empty_like(copied)
    return 2 * copied.nbytes / seconds([lambda: into.copy_(copied)])


def timed(case: Case, implementation: str) -> float:
    """Seconds of a case by one implementation."""
    os.environ["GRASS_KERNELS"] = implementation
    sets = 1 if SMOKE else max(2, min(64, -(-CACHE // case.bytes)))
    return seconds([case.make() for _ in range(sets)])


def table(cases: Iterable[Case]) -> pd.DataFrame:
    """Every case by its kernel and by its torch twin, against the ceiling."""
    ceiling = ceiling_of_bytes()
    rows = []
    for case in cases:
        ours, twin = timed(case, "triton"), timed(case, "torch")
        rows.append(
            {
                "kernel": case.kernel,
                "case": case.case,
                "us": ours * 1e6,
                "torch_us": twin * 1e6,
                "unit": "TB/s",
                "rate": case.bytes / ours / 1e12,
                "ceiling": ceiling / 1e12,
                "of_ceiling": case.bytes / ours / ceiling,
                "target": case.target,
            }
        )
        print(f"{case.kernel} {case.case}: {rows[-1]['of_ceiling']:.2f} of the ceiling", flush=True)
    return pd.DataFrame(rows).assign(**machine())


def machine() -> dict[str, str]:
    """What every row says about where it was measured."""
    name = "none: smoke run" if SMOKE else torch.cuda.get_device_name()
    return {"gpu": name, "torch": torch.__version__, "triton": triton.__version__, "commit": commit()}


def parse(description: str | None, defaults: dict[str, tuple[object, object]]) -> argparse.Namespace:
    """The command line of a GPU benchmark: an option for each of ``defaults``, ``--smoke`` and ``--out``.

    ``defaults`` maps names to the values of a smoke run and of a real one; a list takes several.
    """
    parser = ArgumentParser(description)
    for name, (tiny, real) in defaults.items():
        default = tiny if SMOKE else real
        several = {"type": type(default[0]), "nargs": "+"} if isinstance(default, list) else {"type": type(default)}
        parser.add_argument("--" + name.replace("_", "-"), default=default, **several)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, times meaningless")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu"))
    args = parser.parse_args()
    if not SMOKE and not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU, or --smoke")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(name: str, cases: Callable[[], Iterable[Case]], description: str | None) -> None:
    """Measure and write ``<out>/<name>.csv``."""
    args = parse(description, {})
    torch.manual_seed(0)
    table(cases()).to_csv(args.out / f"{name}.csv", index=False, float_format="%.4g")
    print(f"written to {args.out / name}.csv")
