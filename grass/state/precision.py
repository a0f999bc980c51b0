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

8-bit codes are those of :mod:`grass.kernels.moment_codes`. The second moment is stored as its square root, which
doubles the decades that codes span.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grass.kernels import make_key, random_bits, round_stochastically
from grass.kernels.moment_codes import decode_moment, encode_moment, in_memory_order, laid_out_as

State = dict[str, Any]
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


def read_moments(state: State) -> tuple[Tensor, Tensor]:
    """Both moments in full precision, as they are stored."""
    stored = dict(state)
    exp_avg, exp_avg_sq = (_expanded(stored, name) for name in _STREAMS)
    return exp_avg, exp_avg_sq


_NONE = torch.empty(0)


def _expanded(state: State, name: str) -> Tensor:
    """A moment in float32; drops its scales."""
    stored: Tensor = state[name]
    scale = state.pop(f"{name}_scale", None)
    if scale is None:
        return stored.float() if stored.dtype == torch.bfloat16 else stored
    values: Tensor = decode_moment(stored, scale, name == "exp_avg")
    return values if name == "exp_avg" else values.square_()


def _store(state: State, name: str, precision: str, key: int, stream: int) -> None:
    """Round a moment to ``precision``, in place of its value in ``state``."""
    full: Tensor = state[name]
    if full.dtype != torch.float32:  # of float64 weights: left as it is
        return
    bits = random_bits(torch.arange(full.numel(), device=full.device), key, stream)
    if precision == "bfloat16":
        state[name] = laid_out_as(full, round_stochastically(in_memory_order(full), torch.bfloat16, bits))
        return
    signed = name == "exp_avg"
    state[name], state[f"{name}_scale"] = encode_moment(full if signed else full.sqrt(), signed, bits)
