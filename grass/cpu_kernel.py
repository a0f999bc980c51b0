"""The one-pass CPU kernel behind ``GrassAdamW(..., fused=True)``: compiled on first use, cached by its source.

Torch's operators read the chosen rows once to gather, again to step and again to scatter; at the memory bandwidth of a
CPU that is what a step costs. ``cpu_kernel.cpp`` does it in one pass.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grass.functional import StepCoefficients
from grass.projector import Projector

SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared", "-std=c++17")


def can_step(weight: Tensor, grad: Tensor, exp_avg: Tensor, projector: Projector) -> bool:
    """Whether the kernel takes these tensors: float32 on the CPU, contiguous, rows unscaled."""
    tensors = (weight, grad, exp_avg)
    return (
        projector.scale is None
        and all(type(t) is Tensor and t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and all(t.is_contiguous() for t in tensors)
    )


def step_(
    weight: Tensor,
    projector: Projector,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coefficients: StepCoefficients,
    rows: Tensor | None = None,
    *,
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
) -> None:
    """:func:`grass.functional.project_and_step_` in one pass, from the full gradient.

    With ``rows``, the compact values, ``dim=0`` and ``grad`` compact, it is a step of active rows with its write-back.
    """
    c = coefficients
    step_size, denominator = c.step_size.float().contiguous(), c.denominator.float().contiguous()
    adam = (step_size.data_ptr(), denominator.data_ptr(), step_size.ndim, float(c.shrink))
    decays = 1 - betas[0], betas[1], 1 - betas[1], eps
    last = (*adam, *decays, -1.0 if maximize else 1.0, torch.get_num_threads())
    moments = exp_avg.data_ptr(), exp_avg_sq.data_ptr(), projector.indices.data_ptr()
    r, (m, n) = projector.indices.numel(), weight.shape
    if projector.dim == 0:
        values = None if rows is None else rows.data_ptr()
        library().step_rows(weight.data_ptr(), grad.data_ptr(), values, *moments, r, n, *last)
    else:
        library().step_columns(weight.data_ptr(), grad.data_ptr(), *moments, m, n, r, *last)


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
    adam: list[Any] = [pointer, pointer, size, *[real] * 6, ctypes.c_int]
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
