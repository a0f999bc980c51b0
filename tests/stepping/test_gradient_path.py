"""How far a gradient travels through a step: a newcomer can follow it with the finger on the code."""

from __future__ import annotations

import dataclasses
import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import grass

PACKAGE = Path(grass.__file__).parent


def test_a_gradient_travels_through_few_calls_and_files():
    files = _files_given(_layer_with_gradient())
    visits = [file for file, _ in groupby(files)]
    assert 10 <= len(files) <= 20
    assert len(set(files)) <= 9
    assert len(visits) - len(set(visits)) <= 5  # returns to a file that was left


def _layer_with_gradient() -> tuple[nn.Module, grass.GrassAdamW]:
    """A converted layer in the middle of its interval."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    grass.compact(model, rank=0.125)
    optimizer = grass.GrassAdamW(model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        if step < 3:
            optimizer.step()
    return model[0], optimizer


def _files_given(trained: tuple[nn.Module, grass.GrassAdamW]) -> list[str]:
    """The file of each call in a step that is given the gradient, or the parameter that has it, in their order."""
    layer, optimizer = trained
    memory = layer.active.grad.untyped_storage().data_ptr()
    files = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and PACKAGE in (file := Path(code.co_filename)).parents:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(_has(frame.f_locals.get(name), memory) for name in names):
                files.append(str(file.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return files


def _has(value: Any, memory: int, depth: int = 0) -> bool:
    """Whether an argument is, or holds up to three levels deep, the gradient or its parameter."""
    if isinstance(value, Tensor):
        grads = (value, value.grad) if value.is_leaf else (value,)
        return any(t is not None and t.untyped_storage().data_ptr() == memory for t in grads)
    if depth > 2:
        return False
    if isinstance(value, (list, tuple)):
        return any(_has(each, memory, depth + 1) for each in value)
    if dataclasses.is_dataclass(value):
        return any(_has(getattr(value, f.name, None), memory, depth + 1) for f in dataclasses.fields(value))
    return False
