"""Every kernel compiles for Hopper, without a GPU: what the interpreter cannot see."""

import os
import re
import subprocess
import sys

import pytest

from .compile_all import CUOBJDUMP


@pytest.mark.slow
@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="Triton comes without NVIDIA's tools on this platform")
def test_compiles_for_hopper_without_spills(tmp_path) -> None:
    """In the types of 2 and 4 bytes; float16 takes the registers that bfloat16 takes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "GRASS"))}
    command = [sys.executable, "-m", "tests.kernels.compile_all", "bfloat16", "float32"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [line for line in result.stdout.splitlines() if "REG=" in line]
    assert len({line.split()[0] for line in reports}) == 10
    for line in reports:
        assert "STACK=0 LOCAL=0" in line, f"registers spill: {line}"
    assert {line.split()[1].strip("[*") for line in reports} >= {"bf16", "fp32"}
    product = next(line for line in reports if line.startswith("_transposed_product_kernel"))
    assert int(re.search(r"WGMMA=(\d+)", product)[1]) > 0, f"not on Hopper's matrix units: {product}"
