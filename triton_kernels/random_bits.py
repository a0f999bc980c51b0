r"""Random bits that are a pure function of (key, counter): the same in torch and in Triton, and after a resume.

``bits = f(f(low(c) ^ k0) + k1 + high(c) * C)`` with 32-bit words throughout, where ``c`` is the counter (an element's
place in its matrix), ``k0, k1`` the key, and ``f`` a bijection of three xor-shifts and two multiplications by odd
numbers. A key is made of the integers that name the use: seed, parameter, step.

Stochastic rounding of float32 ``x`` with them picks one of the two neighbours of ``x`` in the narrower type, the upper
with probability ``(x - lower) / (upper - lower)``: the expectation is ``x``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .language import jit, tl

_MASK = 0xFFFFFFFF
_FIRST, _SECOND, _CARRY = 0x7FEB352D, 0x846CA68B, 0x9E3779B1  # odd; the first two spread every bit over the word


class Stream(IntEnum):
    """Independent random bits under one key: every use in one step has a stream of its own.

    ``DRAW`` decides which rows are explored; the others round values.
    """

    VALUES = 0
    EXP_AVG = 1
    EXP_AVG_SQ = 2
    DECAY = 3
    EXPLORED = 4
    EXPLORED_WEIGHT = 5
    DRAW = 6


def make_key(*parts: int) -> int:
    """A 62-bit key, different for different integers ``parts`` (apart from chance collisions)."""
    key = len(parts)
    for part in parts:
        key = (key ^ part) & (2**64 - 1)
        key = (key ^ (key >> 31)) * 0x7FB5D329728EA185 & (2**64 - 1)
        key = (key ^ (key >> 27)) * 0x81DADEF4BC2DD44D & (2**64 - 1)
    return key >> 2


def key_words(key: int, stream: int = Stream.VALUES) -> tuple[int, int]:
    """The two words of a key, each in ``[0, 2^32)``; each stream has its own bits."""
    return key & _MASK, (key >> 32) + stream * _CARRY & _MASK


def random_bits(counter: Tensor, key: int, stream: int = Stream.VALUES) -> Tensor:
    """32 random bits for each int64 ``counter >= 0``, as int64 in ``[0, 2^32)``."""
    return _mixed(counter, *key_words(key, stream))


def random_bits_of_keys(counter: Tensor, keys: Sequence[int], stream: int = Stream.VALUES) -> Tensor:
    """:func:`random_bits` of the counters ``(n,)`` for each of several keys: ``(len(keys), n)``."""
    words = torch.tensor([key_words(key, stream) for key in keys], dtype=torch.int64, device="cpu")
    words = words.to(counter.device, non_blocking=True)  # a GPU is not waited for: this memory is staged at once
    return _mixed(counter, words[:, :1], words[:, 1:])


def _mixed(counter: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    mixed = _mix(counter & _MASK ^ low)
    return _mix(mixed + high + (counter >> 32) * _CARRY & _MASK)


def round_stochastically(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """``x`` in ``dtype``: float32 is rounded up or down by chance to bfloat16 or float16; other types are cast."""
    if dtype == torch.bfloat16:
        raw = x.view(torch.int32).to(torch.int64) & _MASK
        moved = torch.where(x.isfinite(), raw + (bits & 0xFFFF), raw) & 0xFFFF0000
        return torch.where(moved >= 2**31, moved - 2**32, moved).to(torch.int32).view(torch.float32).to(dtype)
    if dtype == torch.float16:
        exponent = (x.view(torch.int32) >> 23 & 0xFF).clamp(113, 142)  # of the spacing: 2^-24 below 2^-14
        up, down = (264 - exponent << 23).view(torch.float32), (exponent - 10 << 23).view(torch.float32)
        whole = torch.floor(x * up + (bits >> 19).to(torch.float32) * 2**-13)
        return torch.where(x.isfinite(), whole * down, x).to(dtype)
    return x.to(dtype)


def _mix(word: Tensor) -> Tensor:
    """``f`` on int64 tensors that hold 32-bit words: products wrap, and their low words are right."""
    word = (word ^ word >> 16) * _FIRST & _MASK
    word = (word ^ word >> 15) * _SECOND & _MASK
    return word ^ word >> 16


@jit
def mix_kernel(word):
    """``f`` on uint32."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@jit
def random_bits_kernel(counter, key, STREAM: tl.constexpr):
    """:func:`random_bits` as uint32, for int64 counters and an int64 key."""
    mixed = mix_kernel(counter.to(tl.uint32) ^ key.to(tl.uint32))
    of_stream: tl.constexpr = (STREAM * 0x9E3779B1) & 0xFFFFFFFF
    high = (key >> 32).to(tl.uint32) + of_stream
    return mix_kernel(mixed + high + (counter >> 32).to(tl.uint32) * 0x9E3779B1)


@jit
def round_stochastically_kernel(x, dtype: tl.constexpr, bits):
    """:func:`round_stochastically`, bit for bit."""
    raw = x.to(tl.uint32, bitcast=True)
    finite = (raw & 0x7F800000) != 0x7F800000
    if dtype == tl.bfloat16:
        moved = tl.where(finite, raw + (bits & 0xFFFF), raw) & 0xFFFF0000
        result = moved.to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        exponent = tl.minimum(tl.maximum(((raw >> 23) & 0xFF).to(tl.int32), 113), 142)
        up = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
        down = ((exponent - 10) << 23).to(tl.float32, bitcast=True)
        whole = tl.floor(x * up + (bits >> 19).to(tl.float32) * 0.0001220703125)
        result = tl.where(finite, whole * down, x)
    else:
        result = x
    return result.to(dtype)
