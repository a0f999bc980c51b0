"""The CPU kernel behind ``GrassAdamW(..., fused=None)``: compiled on first use, cached by its source.

Torch's operators read the selected rows three times: to gather, to step and to scatter. On a CPU, memory bandwidth
decides what a step costs. ``kernel.cpp`` needs one pass, for many weights in one call; Python only checks and lists
their tensors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

logger = logging.getLogger("grass")

_FILES = ("kernel.cpp", "explored.cpp", "draw.cpp", "masters.cpp", "kernel.h")
SOURCES = [Path(__file__).with_name(name) for name in _FILES]
ROUNDING = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")  # chosen rows round alike in every loop
FLAGS = ("-O3", "-march=native", *ROUNDING, "-fopenmp", "-fPIC", "-shared", "-std=c++17")
_OF_THIS_THREAD = threading.local()
_WEIGHT = struct.Struct("PqPqPqPqPqPqPq3P7q5d")  # struct Weight in the source


class Explored(Protocol):
    """Rows of a weight that move without state (:mod:`grass.selection.exploration`)."""

    @property
    def grad(self) -> Tensor:
        """The gradient of the whole weight, or with ``values`` theirs; possibly a ``DTensor``."""

    @property
    def reach(self) -> float:
        """How many times as far as the selected rows they move."""

    @property
    def turns(self) -> float:
        """How many times as much as the selected rows they decay (:func:`grass.selection.exploration.turns`)."""

    @property
    def auto_scale(self) -> float:
        """What ``scale="auto"`` is for this weight (:func:`grass.selection.exploration.auto_scale`)."""

    @property
    def indices(self) -> Tensor | None:
        """int64 ``(q,)``; ``None``: all rows that are not selected."""

    @property
    def values(self) -> Tensor | None:
        """The rows if they are a tensor of their own."""


class Weight(NamedTuple):
    """A weight to step. The fields are the arguments of :func:`grass.kernels.compact_adamw_`.

    Attributes:
        weight: ``(m, n)``; ``None`` if only ``values`` are to be stepped.
        indices: int64 ``(r,)``, the selected rows.
        dim: 0 for rows, 1 for columns.
        grad: of the whole weight; with ``values`` theirs.
        values: the selected rows if they are a tensor of their own (``rows`` there).
        exp_avg: first moments.
        exp_avg_sq: second moments.
        row_steps: Adam steps of the rows, this one included: a number, or float ``(r,)``.
        step_size: the learning rate.
        shrink: ``1 - lr weight_decay``.
        explored: rows that move too (:mod:`grass.selection.exploration`).
        explored_shrink: what these are multiplied by before they move.
    """

    weight: Tensor | None
    indices: Tensor
    dim: int
    grad: Tensor
    values: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    row_steps: Tensor | int
    step_size: float
    shrink: float
    explored: Explored | None = None
    explored_shrink: float = 1.0


class Batch:
    """Weights whose selected and explored rows one call of the kernel steps.

    Args:
        fused: ``None`` takes weights if the kernel can be built, ``True`` requires it, ``False`` takes none.
    """

    def __init__(self, fused: bool | None) -> None:
        self._fused = fused
        self._weights: list[bytes] = []

    def add(self, item: Weight) -> bool:
        """Take a weight if its tensors are float32 on the CPU, and in all of them rows are in one piece, or columns.

        A weight into which ``values`` are copied may differ from the others in this.
        Tensors must live until :meth:`run`.

        Raises:
            RuntimeError: ``fused=True``, and there is no compiler or it fails.
        """
        weight, indices, dim, grad, values, exp_avg, exp_avg_sq, row_steps, step_size, shrink, explored, decay = item
        own = (None, None) if explored is None or values is None else (explored.grad, explored.values)
        matrices = grad, values, exp_avg, exp_avg_sq, *own
        stepped = [t for t in (*matrices, weight if values is None else None) if t is not None]
        along = None if self._fused is False else _direction(stepped)
        if along is None or not is_wanted(self._fused):
            return False
        weight_along = along if weight is None else _direction([weight], along)
        if weight_along is None:
            return False
        self._weights.append(
            _WEIGHT.pack(
                *_places([weight], weight_along),
                *_places(matrices, along),
                indices.data_ptr(),
                row_steps.data_ptr() if isinstance(row_steps, Tensor) else 0,
                0 if explored is None else _address(explored.indices),
                exp_avg.shape[dim],
                exp_avg.shape[1 - dim],
                exp_avg.shape[dim] if weight is None else weight.shape[dim],
                dim == along,  # whether the values of a row are neighbours in memory
                weight_along != along,
                explored is not None,
                0 if explored is None or explored.indices is None else explored.indices.numel(),
                0.0 if explored is None else explored.reach,
                0 if isinstance(row_steps, Tensor) else row_steps,
                step_size,
                shrink,
                decay,
            )
        )
        return True

    def run(self, *, betas: tuple[float, float], eps: float, maximize: bool) -> None:
        """Step all weights taken."""
        if not self._weights:
            return
        numbers = 1 - betas[0], betas[1], 1 - betas[1], eps, -1.0 if maximize else 1.0
        library().step(b"".join(self._weights), len(self._weights), *_logs(betas), *numbers, threads())


def use_threads(count: int | None) -> None:
    """How many threads the kernel has when the calling thread calls it; ``None``: as many as torch uses."""
    _OF_THIS_THREAD.count = count


def threads() -> int:
    """How many threads a call of the kernel by this thread has."""
    return getattr(_OF_THIS_THREAD, "count", None) or torch.get_num_threads()


def _direction(tensors: list[Tensor], preferred: int = 0) -> int | None:
    """0 if the rows of all are in one piece, 1 if the columns are; ``None`` if the kernel does not take them.

    Args:
        tensors: matrices.
        preferred: what to return if both are.
    """
    for t in tensors:
        if type(t) is not Tensor or t.dtype is not torch.float32 or not t.is_cpu:
            return None
    for along in (preferred, 1 - preferred):
        for t in tensors:
            if t.stride(1 - along) != 1 and t.shape[1 - along] != 1:  # the only value of a row may have any stride
                break
        else:
            return along
    return None


def _places(matrices: Iterable[Tensor | None], along: int) -> list[int]:
    """The address of each matrix, and how far its rows (``along=1``: its columns) are apart."""
    places = list[int]()
    for t in matrices:
        places += (0, 0) if t is None else (t.data_ptr(), t.stride(along))
    return places


def _logs(betas: tuple[float, float]) -> list[float]:
    return [math.log(beta) if beta > 0 else -math.inf for beta in betas]


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def is_wanted(fused: bool | None) -> bool:
    """Whether an optimizer with this ``fused`` uses the kernel.

    Raises:
        RuntimeError: ``fused=True``, and there is no compiler or it fails.
    """
    return fused is not False and (library() is not None if fused else at_hand())


@functools.cache
def at_hand() -> bool:
    """Whether the kernel can be built; logs once why not."""
    try:
        library()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        logger.warning("Grass steps CPU weights by torch's operators, which is slower: %s", error)
        return False
    return True


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel, from the cache of this user and machine or built with ``$CXX``, ``g++`` or ``clang++``.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), "g++", "clang++"])), None)
    if compiler is None:
        raise RuntimeError("the kernel needs a C++ compiler (g++ or clang++, or $CXX); fused=False does without")
    built = _cache_directory() / f"cpu_kernel_{_fingerprint(compiler)}.so"
    if not built.exists():
        _build(compiler, built)
    kernel = ctypes.CDLL(str(built))
    real = ctypes.c_float
    kernel.step.argtypes = [ctypes.c_char_p, ctypes.c_int64, *[ctypes.c_double] * 2, *[real] * 5, ctypes.c_int]
    kernel.explore.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
    kernel.step_masters.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64, *[real] * 8, ctypes.c_int]
    kernel.step.restype = kernel.explore.restype = kernel.step_masters.restype = None
    return kernel


def _build(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        output = Path(directory) / target.name
        command = [compiler, *FLAGS, *(str(source) for source in SOURCES if source.suffix == ".cpp"), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
        output.replace(target)  # atomic: several processes may build at once


def _cache_directory() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grass"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    return root


def _fingerprint(compiler: str) -> str:
    """Differs for another source, other flags, another compiler, or another processor (``-march=native``)."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    parts = [*(source.read_text() for source in SOURCES), *FLAGS, compiler, platform.machine(), flags]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
