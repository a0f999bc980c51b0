r"""Moments in less than float32, and the stochastic rounding that preserves small changes.

===========  ====================================================  ===============================
precision    a moment matrix in ``state``                          bytes per value
===========  ====================================================  ===============================
float32      ``exp_avg``                                           4
bfloat16     ``exp_avg``                                           2
8bit         ``exp_avg`` (codes), ``exp_avg_scale`` (per block)    1 and 4/256
===========  ====================================================  ===============================

A second moment decays by a thousandth per step, less than half the spacing of bfloat16 or of any 8-bit code: rounding
to nearest would never change it. So moments are rounded stochastically, which is right in expectation. The random bits
depend on seed, parameter, step and place (:mod:`grass.kernels.random_bits`), so a resumed run draws the same.

8-bit codes are those of :mod:`grass.kernels.moment_codes`. The second moment is stored as its square root, which
doubles the range in decades.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grass.kernels import make_key, random_bits, round_stochastically
from grass.kernels import shrink_ as shrink_by_kernel
from grass.kernels.layout import in_memory_order, laid_out_as
from grass.kernels.moment_codes import decode_moment, encode_moment
from grass.kernels.random_bits import Stream
from grass.options import Options
from grass.state.schema import State

_STREAMS = {"exp_avg": Stream.EXP_AVG, "exp_avg_sq": Stream.EXP_AVG_SQ}


def rounding_key(group: Options | Mapping[str, Any], index: int, step: int) -> int:
    """RNG key for stochastic rounding of one parameter in one step."""
    key: int = make_key(Options.of(group).seed, index, step)
    return key


def refresh_key(options: Options, index: int, steps: int) -> int:
    """RNG key for rounding what a refresh after ``steps`` steps stores; never that of a step, which is positive."""
    return rounding_key(options, index, -1 - steps)


@contextmanager
def full_moments(state: State, precision: str, key: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Within the context ``state`` has moments in full precision; on exit they are stored in ``precision``."""
    if precision != "float32":
        for name in _STREAMS:
            if name in state:
                state[name] = _expanded(state, name)
    yield state.get("exp_avg", _NONE), state.get("exp_avg_sq", _NONE)
    if precision != "float32":
        for name, stream in _STREAMS.items():
            _store(state, name, precision, key, stream)


def shrink_(weights: list[Tensor], factor: float, keys: list[int] | None) -> None:
    """``weight *= factor`` for each; with ``keys``, those in half precision are rounded stochastically."""
    rounded = [keys is not None and weight.dtype in (torch.bfloat16, torch.float16) for weight in weights]
    if plain := [weight for weight, by_chance in zip(weights, rounded, strict=True) if not by_chance]:
        torch._foreach_mul_(plain, factor)
    if keys is not None and any(rounded):
        halves = [(weight, key) for weight, key, by_chance in zip(weights, keys, rounded, strict=True) if by_chance]
        half, own_keys = zip(*halves, strict=True)
        shrink_by_kernel(half, factor, own_keys)


_NONE = torch.empty(0, device="cpu")


def _expanded(state: State, name: str) -> Tensor:
    """A moment in float32; its scales are taken out of ``state``."""
    stored: Tensor = state[name]
    scale = state.pop(f"{name}_scale", None)
    if scale is None:
        return stored.float() if stored.dtype == torch.bfloat16 else stored
    values: Tensor = decode_moment(stored, scale, name == "exp_avg")
    return values if name == "exp_avg" else values.square_()


def _store(state: State, name: str, precision: str, key: int, stream: Stream) -> None:
    """Replace a moment in ``state`` by itself rounded to ``precision``."""
    full: Tensor = state[name]
    if full.dtype != torch.float32:  # moments of float64 weights stay float64
        return
    bits = random_bits(torch.arange(full.numel(), device=full.device), key, stream)
    if precision == "bfloat16":
        state[name] = laid_out_as(full, round_stochastically(in_memory_order(full), torch.bfloat16, bits))
        return
    signed = name == "exp_avg"
    state[name], state[f"{name}_scale"] = encode_moment(full if signed else full.sqrt(), signed, bits)
