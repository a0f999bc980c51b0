"""Which implementation of an operation runs: its Triton kernel or its torch twin. Decided here and nowhere else.

CUDA tensors go to Triton, all others to torch. ``GRASS_KERNELS=torch`` or ``GRASS_KERNELS=triton`` overrides that; on
CPU tensors Triton runs only in its interpreter (``TRITON_INTERPRET=1``, set before the first import). Unsupported
inputs use the torch twin and log one warning; beside a GPU, tensors in host memory do so silently.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .language import INTERPRETED, triton

logger = logging.getLogger("grass")

REAL = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types of the matrices that kernels take; their indices are int64."""

_TYPES: dict[str, frozenset[torch.dtype]] = {}
_LIBRARY = torch.library.Library("grass", "DEF")


def kernel_op(
    schema: str,
    *,
    twin: Callable[..., Any],
    launch: Callable[..., Any],
    fake: Callable[..., Any],
    types: frozenset[torch.dtype] = frozenset(),
) -> Any:
    """Register ``torch.ops.grass.<name>`` and return it.

    Args:
        schema: ``name(arguments) -> returns`` in the syntax of ``torch.library``; ``Tensor(a!)`` is written to.
        twin: the operation in torch; takes every device and type, and is the oracle in tests.
        launch: the operation in Triton.
        fake: shapes and types of the results, for ``torch.compile`` and fake tensors.
        types: dtypes that the kernel takes in addition to :data:`REAL` and int64.
    """
    name = schema[: schema.index("(")]
    _TYPES[name] = REAL | {torch.int64} | types

    def run(*args: Any) -> Any:
        if not runs_triton(name, *args):
            return twin(*args)
        with on_device_of(tensors_of(args)[0]):
            return launch(*args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"grass::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.grass, name).default


def runs_triton(name: str, *args: Any) -> bool:
    """Whether the operation ``name`` takes its Triton kernel for these arguments.

    Raises:
        ValueError: ``GRASS_KERNELS`` is neither ``torch`` nor ``triton``.
    """
    tensors = tensors_of(args)
    if not wants_triton(tensors[0].device.type):
        return False
    reason = _obstacle(tensors, _TYPES.get(name, REAL | {torch.int64}))
    if reason:
        _say_once(name, reason)
    return reason is None


def tensors_of(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among arguments, and the first of each list of them, which are alike."""
    first = (a[0] if isinstance(a, list) and a else a for a in args)
    return [a for a in first if isinstance(a, Tensor)]


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU, which need not be a tensor's: layers may be on several."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def wants_triton(device: str) -> bool:
    """Whether tensors on this type of device go to Triton if a kernel supports them.

    Raises:
        ValueError: ``GRASS_KERNELS`` is neither ``torch`` nor ``triton``.
    """
    choice = os.environ.get("GRASS_KERNELS", "")
    if choice not in ("", "torch", "triton"):
        raise ValueError(f"Invalid GRASS_KERNELS={choice!r}: must be 'torch' or 'triton', or unset")
    if choice == "triton":
        return device != "cpu" or INTERPRETED or not torch.cuda.is_available()
    return choice == "" and device == "cuda"


def _obstacle(tensors: list[Tensor], types: frozenset[torch.dtype]) -> str | None:
    """Why these tensors cannot go to a kernel."""
    if triton is None:
        return "triton is not installed"
    for t in tensors:
        if t.device.type != ("cpu" if INTERPRETED else "cuda"):
            return f"no kernel for {t.device.type} tensors" + (" in the interpreter" if INTERPRETED else "")
        if t.layout != torch.strided or t.dtype not in types:
            return f"no kernel for {t.dtype} tensors of layout {t.layout}"
    return None


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], dim: int = 0) -> None:
    """Check the shape of a tensor, which for ``dim=1`` is transposed already: kernels would read past its end.

    Raises:
        ValueError: it has another.
    """
    if tensor.shape != shape:
        has, must = (tuple(sizes)[::-1] if dim else tuple(sizes) for sizes in (tensor.shape, shape))
        raise ValueError(f"{name} has shape {has}, must be {must}")


@functools.cache
def _say_once(name: str, reason: str) -> None:
    logger.warning("grass::%s runs in torch: %s", name, reason)
