"""Every kernel compiles for four GPUs, none of which is here: what the interpreter cannot see."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
import triton
from triton.backends.compiler import GPUTarget

from .compile_all import CUOBJDUMP, GPUS, Gpu

ROOT = Path(__file__).parents[2]
SPILLED = 8
"""Bytes a thread: one 64-bit value, which the assembler puts aside to run more threads at a time."""
TABLE = ROOT / "benchmarks" / "kernels_compiled.csv"
sys.path.append(str(ROOT / "scripts" / "bench"))
from kernels_compiled import compiled, rows  # noqa: E402


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="Triton comes without NVIDIA's tools on this platform")
@pytest.mark.parametrize(
    "gpu", [pytest.param(gpu, marks=pytest.mark.slow if gpu == "sm_90" else pytest.mark.soak) for gpu in GPUS]
)
def test_compiles_with_next_to_no_spills(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the types of 2 and 4 bytes; float16 takes the registers that bfloat16 takes. The table says what is found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    report = compiled(gpu)
    found = rows(gpu, report)
    assert found.kernel.nunique() == 11
    assert (found.spilled_bytes <= SPILLED).all(), found[found.spilled_bytes > SPILLED]
    if gpu == "sm_90":
        (product, *_) = (line for line in report.splitlines() if line.startswith("_transposed_product_kernel"))
        assert "WGMMA=0" not in product, f"not on Hopper's matrix units: {product}"
    table = pd.read_csv(TABLE)
    if (table.triton == triton.__version__).all():
        known = table[table.gpu == gpu][list(found.columns)].reset_index(drop=True)
        pd.testing.assert_frame_equal(known, found, rtol=5e-3, check_dtype=False)  # three digits


def test_the_table_is_complete() -> None:
    table = pd.read_csv(TABLE)
    assert set(table.gpu) == set(GPUS)
    every = {gpu: set(zip(part.kernel, part.dtype, strict=True)) for gpu, part in table.groupby("gpu")}
    assert len({frozenset(kernels) for kernels in every.values()}) == 1
    assert table.kernel.nunique() == 11
    assert (table.spilled_bytes <= SPILLED).all()
    for row in table.itertuples():
        least = GPUS[row.gpu].occupancy(row.registers, row.shared_bytes, row.warps)
        assert row.occupancy >= least - 5e-4, row  # of a layout, not of the largest of each


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [
        (32, 0, 4, 1.0),
        (33, 0, 4, 12 * 4 / 64),  # 40 registers: 12 warps a part
        (255, 0, 8, 8 / 64),
        (32, 60 << 10, 4, 3 * 4 / 64),  # three of 61 KiB in 228 KiB
        (16, 0, 1, 32 / 64),  # no more than 32 blocks
    ],
)
def test_occupancy_of_an_h100(registers: int, shared: int, warps: int, expected: float) -> None:
    assert GPUS["sm_90"].occupancy(registers, shared, warps) == expected


def test_occupancy_of_one_block_that_fits_and_one_that_does_not() -> None:
    gpu = Gpu(GPUTarget("cuda", 90, 32), shared=100, reserved=0, parts=4, warps=16, registers=512, unit=8)
    assert [gpu.occupancy(32, shared, 4) for shared in (100, 101)] == [4 / 64, 0]
