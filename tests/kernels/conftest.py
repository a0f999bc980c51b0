"""Kernels against their twins: on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (rtol, atol) of one rounding in the type; sums of some hundred products of order one in float32 stay below
TOLERANCE = {torch.float32: (2e-6, 2e-5), torch.bfloat16: (8e-3, 2e-5), torch.float16: (1e-3, 2e-5)}
DTYPES = list(TOLERANCE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "kernels" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``run("triton" or "torch", function, *args)`` with that implementation; a kernel that declines is an error.

    Outside of such a call, as in a reference of float64, kernels may decline.
    """
    from grass.kernels import dispatch

    def refuse(name: str, reason: str) -> None:
        raise AssertionError(f"{name} fell back: {reason}")

    def call(implementation: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_say_once", refuse)
            patch.setenv("GRASS_KERNELS", implementation)
            return function(*args, **kwargs)

    return call


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of lists of weights, for one weight: tensors and keys take the place of lists."""

    def listed(value: Any) -> Any:
        return [value] if isinstance(value, Tensor) else tuple(map(listed, value)) if _is_pair(value) else value

    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() & {"key", "moment_key"}:
            key = options.pop(name)
            options[f"{name}s"] = None if key is None else [key]
        result = function(*map(listed, args), **{name: listed(value) for name, value in options.items()})
        return None if result is None else result[0]

    return call


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(part, Tensor) for part in value)


def assert_close(ours: Tensor, twin: Tensor) -> None:
    """Equal up to one rounding in the type of the result."""
    rtol, atol = TOLERANCE[twin.dtype]
    torch.testing.assert_close(ours, twin, rtol=rtol, atol=atol)


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The same matrix in another memory layout, on the device under test."""
    m, n = matrix.shape
    matrix = matrix.to(DEVICE)
    if layout == "columns":
        return matrix.t().clone(memory_format=torch.contiguous_format).t()
    if layout == "sliced":
        return torch.empty(2 * m, n + 3, dtype=matrix.dtype, device=DEVICE)[::2, 2 : n + 2].copy_(matrix)
    return matrix.clone(memory_format=torch.contiguous_format)


LAYOUTS = ["rows", "columns", "sliced"]


def far_apart(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix whose last row begins beyond 2^31 elements; of its memory only the rows are ever touched."""
    step = 2**31 // (rows - 1) + 7
    return torch.empty((rows - 1) * step + columns, dtype=dtype, device=DEVICE).as_strided((rows, columns), (step, 1))
