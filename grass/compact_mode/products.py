"""The matrix products of compact gradients, by the fastest available library."""

from __future__ import annotations

import torch
from torch import Tensor

from grass import kernels
from grass.kernels.dispatch import runs_triton
from grass.private_names import has_onednn_linear, onednn_linear

ONEDNN_FROM = 4_000_000
"""Multiplications from which oneDNN is faster than the default BLAS; below it, its set-up costs more."""


def sketch_product(kept: Tensor, mixed: Tensor, signs: Tensor | None) -> Tensor:
    """``kept^T mixed S`` in float32; ``signs`` is ``S (l, s)``, or ``None`` for the identity."""
    if signs is not None and runs_triton("row_sketch", kept, mixed, signs):
        sketch: Tensor = kernels.row_sketch(kept, mixed, signs)
        return sketch
    if kept.dtype == torch.float16:  # norms leave its range before their elements do
        kept, mixed = kept.float(), mixed.float()
    return inner_product(kept, mixed if signs is None else mixed @ signs.to(mixed.dtype)).float()


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """``a^T b``: ``(t, k), (t, l) -> (k, l)``, summed over tokens, in the dtype of the operands.

    On x86 CPUs torch multiplies float32 matrices with MKL; oneDNN, which torch ships too, takes large ones here, faster
    with the narrower one first. Torch computes half-precision products and those on other devices.
    """
    if _onednn_pays(a, b):
        if a.shape[1] > b.shape[1]:
            return inner_product(b, a).t().contiguous()
        return onednn_linear(a.t(), b.t())
    return a.t() @ b


def _onednn_pays(a: Tensor, b: Tensor) -> bool:
    return bool(
        a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and type(a) is type(b) is Tensor  # no fake tensor
        and a.shape[0] * a.shape[1] * b.shape[1] >= ONEDNN_FROM
        and not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()  # with create_graph=True, products are differentiated again
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.enabled
        and has_onednn_linear()
    )
