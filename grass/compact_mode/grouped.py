"""Products of experts: tokens sorted by expert, one matrix for each expert.

``ends (E,)`` says where each expert's tokens end. ``torch.nn.functional.grouped_mm`` computes all experts in one call
where it takes the operands; elsewhere there is one product for each expert that has tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from grass.compact_mode.products import inner_product
from grass.device import capability

ALIGNMENT = 16
"""Bytes that ``grouped_mm`` wants strides and addresses to be multiples of."""


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``x_e M_e`` of each expert: ``(t, k), (E, k, l) -> (t, l)``; zero behind the last expert's tokens."""
    if _runs_grouped(x, matrices):
        product = F.grouped_mm(x, matrices, offs=ends.to(torch.int32))
        return product.masked_fill_(_behind(ends, x), 0.0)
    product = x.new_zeros(x.shape[0], matrices.shape[2])
    for expert, tokens in _slices(ends):
        torch.mm(x[tokens], matrices[expert], out=product[tokens])
    return product


def grouped_inner_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """``a_e^T b_e`` of each expert, summed over its tokens: ``(t, k), (t, l) -> (E, k, l)``; zero without tokens."""
    if _runs_grouped(a, b):
        return F.grouped_mm(a.t(), b, offs=ends.to(torch.int32))
    product = a.new_zeros(ends.numel(), a.shape[1], b.shape[1])
    for expert, tokens in _slices(ends):
        product[expert] = inner_product(a[tokens], b[tokens])
    return product


def experts_of_tokens(ends: Tensor, tokens: int) -> Tensor:
    """int64 ``(t,)``: the expert of each token; the last one for tokens behind all."""
    places = torch.arange(tokens, device=ends.device)
    return torch.searchsorted(ends.long(), places, right=True).clamp_(max=ends.numel() - 1)


def _slices(ends: Tensor) -> list[tuple[int, slice]]:
    """The experts that have tokens, and which."""
    limits = [0, *ends.tolist()]
    return [(e, slice(start, end)) for e, (start, end) in enumerate(pairwise(limits)) if start < end]


def _behind(ends: Tensor, x: Tensor) -> Tensor:
    return (torch.arange(x.shape[0], device=x.device) >= ends[-1]).unsqueeze(1)


def _runs_grouped(a: Tensor, b: Tensor) -> bool:
    """Whether ``grouped_mm`` takes some tokens: bfloat16 from CUDA's capability 8.0 on; float32 on the CPU too."""
    if a.device.type == "cpu":
        runs = a.dtype in (torch.float32, torch.bfloat16)
    else:
        runs = a.dtype == torch.bfloat16 and capability(a.device) >= (8, 0)
    return runs and len(a) > 0 and all(_is_aligned(t) for t in (a, b))  # gradients of no tokens may have no strides


def _is_aligned(tensor: Tensor) -> bool:
    """Whether all strides but one of 1 are aligned. A matrix of one column has two of them."""
    _, *strides = sorted(tensor.stride())
    return all(n * tensor.element_size() % ALIGNMENT == 0 for n in (tensor.storage_offset(), *strides))
