r"""Weights as int8 codes with one scale per row or column. (:mod:`grass.kernels.moment_codes` encodes moments.)

``W_ij = C_ij s_i`` (``dim=0``) or ``C_ij s_j`` (``dim=1``), with ``s = max |W| / 127`` over the row or column. Rounding
is to nearest, or stochastic: ``C = floor(W / s + u)`` with ``u`` uniform on ``[0, 1)``, whose expectation is ``W / s``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grass.kernels.random_bits import random_bits

LEVELS = 127


def encode_weight(matrix: Tensor, dim: int, key: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes ``(m, n)`` int8, in the layout of ``matrix``, and float32 scales: ``(m,)`` for ``dim=0``, else ``(n,)``.

    With a ``key`` rounding is stochastic, by random bits that depend on the key and an element's place. Without a key
    it is to nearest. A row or column that has a value that is not finite is decoded as values that are none either.
    """
    largest = matrix.abs().amax(1 - dim).float()
    scale = torch.where(largest == 0, 1.0, largest) / LEVELS
    scale = torch.where(scale.isfinite(), scale, float("nan"))
    levels = matrix.float() / scale.unsqueeze(1 - dim)
    if key is None:
        levels = levels.round_()
    else:
        place = torch.arange(matrix.numel(), device=matrix.device).view(matrix.shape)
        levels = levels.add_((random_bits(place, key) >> 8).to(torch.float32), alpha=2**-24).floor_()
    return levels.clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def decode_weight(codes: Tensor, scale: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """``W`` in ``dtype``, rounded once from float32 products; also of a batch ``(E, m, n)`` with scales ``(E, m)``."""
    scale = scale.unsqueeze(scale.ndim - dim)
    if torch.compiler.is_compiling():  # fuses the cast, and takes no ``out`` that is not contiguous
        return (codes * scale).to(dtype)
    return torch.mul(codes, scale, out=torch.empty_like(codes, dtype=dtype))
