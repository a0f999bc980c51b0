r"""Moments in less than float32, and the rounding that keeps small changes alive.

===========  ====================================================  ===============================
precision    a moment matrix in ``state``                          bytes per value
===========  ====================================================  ===============================
float32      ``exp_avg``                                           4
bfloat16     ``exp_avg``                                           2
8bit         ``exp_avg`` (codes), ``exp_avg_scale`` (per block)    1 and 4/256
===========  ====================================================  ===============================

A second moment decays by a thousandth a step, less than half the spacing of bfloat16 or of any 8-bit code: rounded to
the nearest it would never move. So what is stored is rounded up or down by chance, right in expectation, with bits from
a counter (:mod:`grass.kernels.random_bits`) keyed by seed, parameter and step: a resumed run draws the same.

8-bit codes are blockwise and dynamic (after Dettmers et al., 2022, arXiv 2110.02861): 256 consecutive values share a
scale, their largest magnitude; below it, each decade has half as many codes as the one above. Of the second moment the
square root is coded, which doubles the decades that it spans.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grass.kernels import make_key, random_bits, round_stochastically
from grass.projector import is_column_major

State = dict[str, Any]
BLOCK = 256
PRECISIONS = ("float32", "bfloat16", "8bit")
_STREAMS = {"exp_avg": 1, "exp_avg_sq": 2}


def rounding_key(group: dict[str, Any], index: int, step: int) -> int:
    """The key of one parameter's rounding in one step."""
    key: int = make_key(group["seed"], index, step)
    return key


@contextmanager
def full_moments(state: State, precision: str, key: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Both moments in full precision, to change in place or replace in ``state``; stored in ``precision`` after."""
    if precision != "float32":
        for name in _STREAMS:
            if name in state:
                state[name] = _expanded(state, name)
    yield state.get("exp_avg", _NONE), state.get("exp_avg_sq", _NONE)
    if precision != "float32":
        for name, stream in _STREAMS.items():
            _store(state, name, precision, key, stream)


def shrink_(weight: Tensor, factor: float, key: int | None) -> None:
    """``weight *= factor``, rounded stochastically where the weight is in half precision and there is a ``key``."""
    if key is None or weight.dtype not in (torch.bfloat16, torch.float16):
        weight.mul_(factor)
        return
    bits = random_bits(torch.arange(weight.numel(), device=weight.device).view(weight.shape), key, stream=3)
    weight.copy_(round_stochastically(weight.float().mul_(factor), weight.dtype, bits))


_NONE = torch.empty(0)


def _expanded(state: State, name: str) -> Tensor:
    """A moment in float32; drops its scales."""
    stored: Tensor = state[name]
    scale = state.pop(f"{name}_scale", None)
    if scale is None:
        return stored.float() if stored.dtype == torch.bfloat16 else stored
    values = dynamic_map(name == "exp_avg", str(stored.device))[_in_memory_order(stored).to(torch.int32)]
    values = _blocks(values).mul_(scale.unsqueeze(1)).flatten()[: stored.numel()]
    return _like(stored, values if name == "exp_avg" else values.square_())


def _store(state: State, name: str, precision: str, key: int, stream: int) -> None:
    """Round a moment to ``precision``, in place of its value in ``state``."""
    full: Tensor = state[name]
    if full.dtype != torch.float32:  # of float64 weights: left as it is
        return
    bits = random_bits(torch.arange(full.numel(), device=full.device), key, stream)
    flat = _in_memory_order(full)
    if precision == "bfloat16":
        state[name] = _like(full, round_stochastically(flat, torch.bfloat16, bits))
        return
    signed = name == "exp_avg"
    codes, scale = quantize(flat if signed else flat.sqrt(), signed, bits)
    state[name], state[f"{name}_scale"] = _like(full, codes), scale


def quantize(flat: Tensor, signed: bool, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``(k,)`` and scales float32 ``(ceil(k / 256),)`` of ``k`` values; ``bits`` decide up or down."""
    blocks = _blocks(flat)
    scale = blocks.abs().amax(1)
    unit = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).flatten()[: flat.numel()]
    levels = dynamic_map(signed, str(flat.device))
    lower = (torch.searchsorted(levels, unit, right=True) - 1).clamp_(0, len(levels) - 2)
    below = levels[lower]
    share = (unit - below) / (levels[lower + 1] - below)
    codes = lower + ((bits >> 8).to(torch.float32) * 2**-24 < share)
    return codes.to(torch.uint8), scale


@functools.cache
def dynamic_map(signed: bool, device: str = "cpu") -> Tensor:
    """255 (signed) or 256 ascending levels up to 1: half of them in the first decade, a quarter in the next, ..."""
    first = 64 if signed else 128
    decades, scale, count = [torch.ones(1, dtype=torch.float64)], 1.0, first
    while count:
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64) * scale
        decades.append(edges[:-1])
        scale, count = scale / 10, count // 2
    positive = torch.cat(decades).sort().values[1:]  # 255 or 256 levels in all
    zero = torch.zeros(1, dtype=torch.float64)
    levels = torch.cat([-positive.flip(0), zero, positive]) if signed else torch.cat([zero, positive])
    return levels.float().to(device)


def _in_memory_order(matrix: Tensor) -> Tensor:
    return (matrix.t() if matrix.ndim == 2 and is_column_major(matrix) else matrix).reshape(-1)


def _like(matrix: Tensor, flat: Tensor) -> Tensor:
    """Flat values back in the shape and memory order of ``matrix``."""
    if matrix.ndim == 2 and is_column_major(matrix):
        return flat.view(matrix.t().shape).t()
    return flat.view(matrix.shape)


def _blocks(flat: Tensor) -> Tensor:
    """``(k,) -> (ceil(k / 256), 256)``, zeros at the end."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
