r"""Moments as 8-bit codes, blockwise and dynamic (of weights, linear: :mod:`grass.compact_mode.weight_codes`).

After Dettmers et al., 2022, arXiv 2110.02861: 256 consecutive values share a scale, their largest magnitude; below it,
each decade has half as many codes as the one above. Values between two codes are rounded stochastically, which is right
in expectation.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .layout import in_memory_order, laid_out_as

BLOCK = 256


def encode_moment(matrix: Tensor, signed: bool, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8, laid out as the matrix, and scales float32 ``(ceil(k / 256),)`` of its ``k`` values.

    Blocks and ``bits (k,)``, which decide up or down, follow the order of memory.
    """
    flat = in_memory_order(matrix)
    blocks = _blocks(flat)
    scale = blocks.abs().amax(1)
    unit = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).flatten()[: flat.numel()]
    levels = dynamic_map(signed, str(flat.device))
    lower = (torch.searchsorted(levels, unit, right=True) - 1).clamp_(0, len(levels) - 2)
    below = levels[lower]
    share = (unit - below) / (levels[lower + 1] - below)
    codes = lower + ((bits >> 8).to(torch.float32) * 2**-24 < share)
    return laid_out_as(matrix, codes.to(torch.uint8)), scale


def decode_moment(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """The float32 values that codes and their scales stand for."""
    values = dynamic_map(signed, str(codes.device))[in_memory_order(codes).to(torch.int32)]
    return laid_out_as(codes, _blocks(values).mul_(scale.unsqueeze(1)).flatten()[: codes.numel()])


@functools.cache
def dynamic_map(signed: bool, device: str = "cpu") -> Tensor:
    """255 (signed) or 256 ascending levels up to 1: half of them in the first decade, a quarter in the next, ..."""
    first = 64 if signed else 128
    decades, scale, count = [torch.ones(1, dtype=torch.float64, device="cpu")], 1.0, first
    while count:
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64, device="cpu") * scale
        decades.append(edges[:-1])
        scale, count = scale / 10, count // 2
    positive = torch.cat(decades).sort().values[1:]  # 255 or 256 levels in all
    zero = torch.zeros(1, dtype=torch.float64, device="cpu")
    levels = torch.cat([-positive.flip(0), zero, positive]) if signed else torch.cat([zero, positive])
    return levels.float().to(device)


def _blocks(flat: Tensor) -> Tensor:
    """``(k,) -> (ceil(k / 256), 256)``, zeros at the end."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
