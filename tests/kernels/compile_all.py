"""Compile every kernel for an H200 without one, and print what the assembler reports: one line a kernel.

    env -u TRITON_INTERPRET python -m tests.kernels.compile_all [float32 bfloat16 float16]

The launchers run on CPU tensors of LLaMA 7b's shapes with launches turned into compilations; nothing is computed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from grass import kernels
from grass.kernels import dispatch

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Hopper:
    """What the compiler asks the driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> list[tuple[str, Any]]:
    """Have every launch append ``(name, compiled kernel)`` to the list returned instead."""
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = record
    driver.set_active(Hopper())
    dispatch._obstacle = lambda tensors, types: None
    dispatch.wants_triton = lambda device: True
    return compiled


def launch_everything(dtypes: list[torch.dtype]) -> None:
    """One launch of each kernel in each of its layouts."""
    m, n, r, tokens = 512, 1024, 256, 384  # the shapes of the tiles are those of larger matrices
    indices, scale = torch.arange(r), torch.ones(r)
    for dtype in dtypes:
        x, x_cols = torch.zeros(m, n, dtype=dtype), torch.zeros(n, m, dtype=dtype).t()
        for matrix in (x, x_cols):
            kernels.gather_rows(matrix, indices)
            kernels.gather_cols(matrix, indices)
            kernels.scatter_add_rows(matrix, indices, torch.zeros(r, n))
            kernels.scatter_add_cols(matrix, indices, torch.zeros(m, r, dtype=dtype), scale)
            kernels.row_norms(matrix, 0)
            kernels.row_norms(matrix, 1)
            for dim in (0, 1):
                shape = (r, n) if dim == 0 else (m, r)
                moments = [torch.zeros(shape) for _ in range(2)]
                rows = torch.zeros(shape)
                options = {"dim": dim, "step_size": 1e-3}
                kernels.compact_adamw_(matrix, indices, matrix, *moments, 3.0, gather_grad=True, key=5, **options)
                kernels.compact_adamw_(matrix, indices, rows, *moments, scale, rows=rows, **options)
                codes = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
                coded = codes[0], torch.zeros(m * n // 256), codes[1], torch.zeros(m * n // 256)
                keys = {"moment_key": 6, **options}
                kernels.compact_adamw_8bit_(matrix, indices, matrix, *coded, 3.0, gather_grad=True, key=5, **keys)
                kernels.compact_adamw_8bit_(matrix, indices, rows, *coded, scale, rows=rows, **keys)
                numbers = (torch.zeros((n, m)[dim]), torch.zeros(()))
                for steps in (3.0, scale):
                    kernels.move_factors(*moments, rows, steps, dim=dim)
                    kernels.move_factors(*moments, matrix, steps, indices=indices, dim=dim)
                kernels.move_rows_(matrix, indices, matrix, *numbers, step_size=0.1, dim=dim, gather_grad=True, key=5)
                kernels.move_rows_(matrix, indices, rows, *numbers, step_size=0.1, dim=dim, rows=rows, key=5)
                whole = {"norms": scale, "gather_grad": True}
                kernels.move_rows_(matrix, indices, matrix, *numbers, step_size=0.1, dim=dim, **whole)
        g, inputs = torch.zeros(tokens, m, dtype=dtype), torch.zeros(tokens, n, dtype=dtype)
        kernels.compact_grad(g, inputs, indices)
        kernels.row_sketch(g, inputs, torch.zeros(n, 32))


def resources(kernel: Any) -> dict[str, int]:
    """Registers, stack and shared memory, in the assembler's words."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", output)}


def main() -> None:
    compiled = compile_only()
    launch_everything([getattr(torch, name) for name in sys.argv[1:] or ("float32", "bfloat16", "float16")])
    for name, kernel in compiled:
        ptx = kernel.asm["ptx"]
        wide = len(re.findall(r"(?:ld|st)\.global\S*\.v[248]\.b(?:32|64)|\.v4\.", ptx))
        types = " ".join(str(t) for t in kernel.src.signature.values() if "*" in str(t))
        report = " ".join(f"{key}={value}" for key, value in resources(kernel).items())
        print(f"{name} [{types}] {report} SHARED={kernel.metadata.shared} WIDE={wide} WGMMA={ptx.count('wgmma.mma')}")


if __name__ == "__main__":
    main()
