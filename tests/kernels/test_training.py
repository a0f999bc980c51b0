"""Whole training steps through the kernels against the same through torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import grass

from .conftest import DEVICE

OPTIONS = {**grass.PAPER, "lr": 1e-2, "weight_decay": 0.1, "update_interval": 3, "selection": "uniform"}


def train(
    compact: bool, dim: int, dtype: torch.dtype, steps: int = 8, rows: Any = None, **options: Any
) -> list[Tensor]:
    """Weights after some steps, from one seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 7)).to(DEVICE, dtype)
    if compact:
        explore, weights = options.pop("explore", 0), options.pop("weights", None)
        grass.compact(model, rank=0.4, explore=explore, dim=dim, dtype=rows, weights=weights)
        optimizer = grass.GrassAdamW(model, **{**OPTIONS, "explore": None, **options})
    else:
        optimizer = grass.GrassAdamW(model.parameters(), rank=0.4, **{**OPTIONS, "dim": dim, **options})
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 13).to(DEVICE, dtype)).float().square().sum().backward()
        optimizer.step()
    return [p.float() for p in model.state_dict().values()]


CASES = [
    (True, 1, {"weights": "int8", "state_policy": "keep"}),
    *itertools.product([False, True], [0, 1], [{"sketch_size": 4}, {"state_policy": "bank"}]),
    (False, 0, {"decay": "all", "state_policy": "keep"}),
    (True, 1, {"decay": "all", "warmup_after_refresh": 2, "scale": 0.5, "maximize": True}),
    (True, 0, {"moment_dtype": "bfloat16", "state_policy": "keep"}),
    (True, 1, {"moment_dtype": "8bit", "state_policy": "bank"}),
    (False, 0, {"replacement": True}),
    (False, 1, {"moment_dtype": "8bit", "replacement": True}),
    *itertools.product([False, True], [0, 1], [{"explore": 2}, {"explore": 1.0, "maximize": True}]),
    (True, 0, {"explore": 2, "moment_dtype": "bfloat16"}),
    (False, 1, {"explore": 2, "moment_dtype": "8bit"}),
    (True, 1, {"explore": 2, "weights": "int8"}),
]


@pytest.mark.parametrize(("compact", "dim", "options"), CASES, ids=str)
def test_equals_torch(compact, dim, options, run) -> None:
    ours, theirs = (run(which, train, compact, dim, torch.float32, **options) for which in ("triton", "torch"))
    narrow = options.get("moment_dtype", "float32") != "float32"
    for a, b in zip(ours, theirs, strict=True):
        # float32: eight steps of rounding differences; narrow moments: a last bit decides between neighbouring codes
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-3 if narrow else 2e-5)


@pytest.mark.parametrize("explore", [0, 2])
@pytest.mark.parametrize("rows", [None, torch.float32], ids=["own-rows", "float32-rows"])
@pytest.mark.parametrize("compact", [False, True], ids=["dense", "compact"])
def test_bfloat16_weights(compact, rows, explore, run) -> None:
    arguments = (compact, 1, torch.bfloat16)
    options = {"rows": rows, "steps": 2, "explore": explore}
    ours, theirs = (run(which, train, *arguments, **options) for which in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


class Recorder(TorchDispatchMode):
    """Names of the operations of ours that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "grass":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_kernels_are_taken(run) -> None:
    """Under ``GRASS_KERNELS=triton`` every part of a step runs its kernel, and under ``torch`` it needs none."""
    norms = {"selection": "multinomial_norm"}
    for which in ("torch", "triton"):
        explore = {"explore": 2 if which == "triton" else 0}  # torch's twins of these run wherever C++ does not
        with Recorder() as recorder:
            for dim in (0, 1):
                run(which, train, True, dim, torch.float32, steps=4, sketch_size=4, **norms, **explore)
                run(which, train, False, dim, torch.float32, steps=2, replacement=True, **norms)
        every = {"compact_adamw_", "row_sketch", "row_norms", "scatter_add_rows"}
        every |= {"move_factors", "move_rows_"}
        every |= {"reload_rows_"} if DEVICE == "cuda" else set()  # C++ draws and copies on the CPU
        assert recorder.names == (every if which == "triton" else {"row_norms"})
