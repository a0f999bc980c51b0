"""Compile every kernel for a GPU without one, and print what the assembler reports: one line a kernel.

    env -u TRITON_INTERPRET python -m tests.kernels.compile_all sm_90 [float32 bfloat16 float16]

The GPU is sm_80 (A100), sm_90 (H100, H200), sm_100 (B200) or gfx942 (MI300). The launchers run on CPU tensors of LLaMA
7b's shapes with launches turned into compilations; nothing is computed. ``scripts/bench/kernels_compiled.py`` makes a
table of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Gpu:
    """What one processor of a GPU has, by which it runs several blocks of threads at a time.

    Attributes:
        target: for the compiler.
        shared: bytes of shared memory of the processor.
        reserved: bytes of it that each block takes beside its own.
        parts: into which the processor divides its warps.
        warps: of each part, at most.
        registers: of each part, in registers of a whole warp.
        unit: by how many such registers a warp's are rounded up.
    """

    target: GPUTarget
    shared: int
    reserved: int
    parts: int
    warps: int
    registers: int
    unit: int

    def occupancy(self, registers: int, shared: int, warps: int) -> float:
        """Share of the warps that run at a time, for blocks of so many warps, registers a thread and bytes."""
        rounded = -(-max(registers, 1) // self.unit) * self.unit
        by_warps = self.parts * min(self.warps, self.registers // rounded) // warps
        by_memory = self.shared // (shared + self.reserved) if shared + self.reserved else by_warps
        return min(by_warps, by_memory, MOST_BLOCKS) * warps / (self.parts * self.warps)


MOST_BLOCKS = 32
"""Blocks of threads that a processor runs at a time."""
GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), 164 << 10, 1 << 10, 4, 16, 512, 8),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), 228 << 10, 1 << 10, 4, 16, 512, 8),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), 228 << 10, 1 << 10, 4, 16, 512, 8),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), 64 << 10, 0, 4, 8, 512, 8),
}
"""From the makers' tables: NVIDIA's of compute capabilities, AMD's of CDNA 3."""


class Driver:
    """What the compiler asks the driver."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(target: GPUTarget) -> list[tuple[str, Any]]:
    """Have every launch append ``(name, compiled kernel)`` to the list returned instead."""
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = record
    driver.set_active(Driver(target))
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
            kernels.scatter_add_rows(matrix, indices, torch.zeros(r, n))
            kernels.scatter_add_cols(matrix, indices, torch.zeros(m, r, dtype=dtype), scale)
            kernels.row_norms(matrix, 0)
            kernels.row_norms(matrix, 1)
            if dtype != torch.float32:
                kernels.shrink_([matrix], 0.9, [5])
            for dim in (0, 1):
                shape = (r, n) if dim == 0 else (m, r)
                moments = [[torch.zeros(shape)] for _ in range(2)]
                rows, of_matrix, chosen, ages = torch.zeros(shape), [matrix], [indices], [scale]
                full = {"gather_grad": True, "keys": [5], "dim": dim}
                own = {"rows": [rows], "dim": dim, "step_size": 1e-3}
                kernels.compact_adamw_(of_matrix, chosen, of_matrix, *moments, 3.0, step_size=1e-3, **full)
                kernels.compact_adamw_(of_matrix, chosen, [rows], *moments, ages, **own)
                codes = [[torch.zeros(shape, dtype=torch.uint8)] for _ in range(2)]
                scales = [[torch.zeros(m * n // 256)] for _ in range(2)]
                coded = codes[0], scales[0], codes[1], scales[1]
                more = {"moment_keys": [6], "step_size": 1e-3}
                kernels.compact_adamw_8bit_(of_matrix, chosen, of_matrix, *coded, 3.0, **more, **full)
                kernels.compact_adamw_8bit_(of_matrix, chosen, [rows], *coded, ages, **(more | own))
                numbers = [torch.zeros((n, m)[dim])], [torch.zeros(())]
                for steps in (3.0, ages):
                    kernels.move_factors(*moments, [rows], steps, dim=dim)
                    kernels.move_factors(*codes, [rows], steps, scales=tuple(scales), dim=dim)
                    kernels.move_factors(*moments, of_matrix, steps, indices=chosen, dim=dim)
                kernels.move_rows_(of_matrix, chosen, of_matrix, *numbers, step_size=0.1, **full)
                kernels.move_rows_(of_matrix, chosen, [rows], *numbers, keys=[5], **own)
                whole = {"norms": [scale], "gather_grad": True}
                kernels.move_rows_(of_matrix, chosen, of_matrix, *numbers, step_size=0.1, dim=dim, **whole)
                kernels.reload_rows_([rows], of_matrix, chosen, dim=dim)
        g, inputs = torch.zeros(tokens, m, dtype=dtype), torch.zeros(tokens, n, dtype=dtype)
        kernels.row_sketch(g, inputs, torch.zeros(n, 32))


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and local memory, which registers spill to."""
    if "amdgcn" in kernel.asm:
        found = dict(re.findall(r"\.(\w+_count|private_segment_fixed_size):\s*(\d+)", kernel.asm["amdgcn"]))
        spilled = 4 * (int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"]))
        vectors = int(found["vgpr_count"]) + int(found.get("agpr_count", 0))
        return {"REG": vectors, "STACK": int(found["private_segment_fixed_size"]), "LOCAL": spilled}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", output)}


def main() -> None:
    gpu = GPUS[sys.argv[1]]
    compiled = compile_only(gpu.target)
    launch_everything([getattr(torch, name) for name in sys.argv[2:] or ("float32", "bfloat16", "float16")])
    for name, kernel in compiled:
        ptx = kernel.asm.get("ptx", "")
        wide = len(re.findall(r"(?:ld|st)\.global\S*\.v[248]\.b(?:32|64)|\.v4\.", ptx))
        types = " ".join(str(t) for t in kernel.src.signature.values() if "*" in str(t))
        used, shared, warps = resources(kernel), kernel.metadata.shared, kernel.metadata.num_warps
        report = " ".join(f"{key}={value}" for key, value in used.items())
        report += f" SHARED={shared} WARPS={warps} OCCUPANCY={gpu.occupancy(used['REG'], shared, warps):.3f}"
        print(f"{name} [{types}] {report} WIDE={wide} WGMMA={ptx.count('wgmma.mma')}")


if __name__ == "__main__":
    main()
