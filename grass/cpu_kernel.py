"""The one-pass CPU kernel behind ``GrassAdamW(..., fused=True)``: compiled on first use, cached by its source.

Torch's operators read the chosen rows once to gather, again to step and again to scatter; at the memory bandwidth of a
CPU that is what a step costs. ``cpu_kernel.cpp`` does it in one pass.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grass.projector import Projector

SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared", "-std=c++17")


def can_step(weight: Tensor, grad: Tensor, exp_avg: Tensor, projector: Projector) -> bool:
    """Whether the kernel takes these tensors: float32 on the CPU, contiguous, rows unscaled."""
    return projector.scale is None and all(_takes(t) and t.is_contiguous() for t in (weight, grad, exp_avg))


def can_step_active(dim: int, *tensors: Tensor) -> bool:
    """Whether the kernel takes active rows, their gradient and moments, and their weight: rows (columns) contiguous."""
    for t in tensors:
        if not _takes(t) or not (t.is_contiguous() if dim == 0 else t.stride() == (1, t.shape[0])):
            return False
    return True


def _takes(t: Tensor) -> bool:
    return type(t) is Tensor and t.dtype is torch.float32 and t.is_cpu


def step_(
    weight: Tensor,
    projector: Projector,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    row_steps: Tensor | int,
    *,
    step_size: float,
    shrink: float,
    **adam: Any,
) -> None:
    """:func:`grass.functional.project_and_step_` in one pass, from the full gradient.

    Numbers are those of :func:`grass.kernels.compact_adamw_`.
    """
    r, (m, n) = projector.indices.numel(), weight.shape
    moments = exp_avg.data_ptr(), exp_avg_sq.data_ptr(), projector.indices.data_ptr()
    last = _numbers(row_steps, r, step_size, shrink, **adam)
    if projector.dim == 0:
        library().step_rows(weight.data_ptr(), grad.data_ptr(), None, *moments, r, n, *last)
    else:
        library().step_columns(weight.data_ptr(), grad.data_ptr(), *moments, m, n, r, *last)


def step_active_(
    dim: int,
    weight: Tensor,
    indices: Tensor,
    rows: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    row_steps: Tensor | int,
    *,
    step_size: float,
    shrink: float,
    **adam: Any,
) -> None:
    """:func:`grass.functional.step_active_` and the write-back to the weight, in one pass."""
    tensors = (weight, grad, rows, exp_avg, exp_avg_sq, indices)
    r, n = rows.shape[dim], rows.shape[1 - dim]
    library().step_rows(*(t.data_ptr() for t in tensors), r, n, *_numbers(row_steps, r, step_size, shrink, **adam))


def _numbers(
    row_steps: Tensor | int,
    r: int,
    step_size: float,
    shrink: float,
    *,
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
) -> tuple[Any, ...]:
    """The arguments that the kernels share, from the ages of the rows on."""
    logs = (math.log(beta) if beta > 0 else -math.inf for beta in betas)
    decays = 1 - betas[0], betas[1], 1 - betas[1], eps
    ages: Any = row_steps.data_ptr() if isinstance(row_steps, Tensor) else ctypes.byref(ctypes.c_float(row_steps))
    count = r if isinstance(row_steps, Tensor) else 1
    return ages, count, step_size, *logs, shrink, *decays, -1.0 if maximize else 1.0, torch.get_num_threads()


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel, from the cache of this user and machine or built with ``$CXX``, ``g++`` or ``clang++``.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), "g++", "clang++"])), None)
    if compiler is None:
        raise RuntimeError("fused=True needs a C++ compiler on CPU (g++ or clang++, or $CXX); fused=False does not")
    built = _cache_directory() / f"cpu_kernel_{_fingerprint(compiler)}.so"
    if not built.exists():
        _build(compiler, built)
    kernel = ctypes.CDLL(str(built))
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    adam: list[Any] = [pointer, size, *[ctypes.c_double] * 3, *[real] * 6, ctypes.c_int]
    kernel.step_rows.argtypes = [*[pointer] * 6, *[size] * 2, *adam]
    kernel.step_columns.argtypes = [*[pointer] * 5, *[size] * 3, *adam]
    kernel.step_rows.restype = kernel.step_columns.restype = None
    return kernel


def _build(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        output = Path(directory) / target.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
        output.replace(target)  # atomic: several processes may build at once


def _cache_directory() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grass"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    return root


def _fingerprint(compiler: str) -> str:
    """Changes with the source, the flags, the compiler and the processor that ``-march=native`` stands for."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    parts = [SOURCE.read_text(), *FLAGS, compiler, os.uname().machine, flags]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
