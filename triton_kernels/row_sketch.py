r"""A Johnson-Lindenstrauss sketch of a gradient that is never formed: ``A^T (B S)`` for ``G = A^T B``.

``A (b, k), B (b, l) -> (k, s)``: with ``S (l, s)`` of independent signs over ``sqrt(s)`` the norm of a sketched row is,
in the root mean square, that of the row of ``G``. The signs are bits of a counter (:mod:`random_bits`), made inside the
kernel, so that nothing is stored or read for them; or they are given.

Floor: ``b (k + l) e`` bytes of ``e`` per element and ``4 k s``; ``2 b s (k + l)`` FLOPs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compact_grad import transposed_product
from .dispatch import kernel_op
from .language import INTERPRETED, cdiv, jit, narrowed, power_of_two, tl
from .random_bits import key_words, random_bits, random_bits_kernel


def row_sketch(kept: Tensor, mixed: Tensor, signs: Tensor | None = None, *, size: int = 32, key: int = 0) -> Tensor:
    """``kept^T (mixed S)`` in float32: ``(b, k), (b, l) -> (k, s)``.

    Args:
        kept: the operand whose features keep their place, ``(b, k)``.
        mixed: the operand whose features are mixed, ``(b, l)``, of the same type.
        signs: ``S (l, s)``; ``None`` draws it, and ``size`` and ``key`` say which.
        size: ``s``.
        key: of the signs, :func:`random_bits.make_key`.
    """
    sketch: Tensor = _row_sketch(kept, mixed, signs, size if signs is None else signs.shape[1], key)
    return sketch


def random_signs(length: int, size: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """The signs that ``key`` stands for, over ``sqrt(size)``: float32 ``(length, size)``."""
    counter = torch.arange(length * size, device=device).view(length, size)
    return (1.0 - 2.0 * (random_bits(counter, key) & 1)) * size**-0.5


def _twin(kept: Tensor, mixed: Tensor, signs: Tensor | None, size: int, key: int) -> Tensor:
    if signs is None:
        signs = random_signs(mixed.shape[1], size, key, mixed.device)
    kept, mixed = kept.contiguous(), mixed.contiguous()  # torch multiplies strided bfloat16 wrongly on some CPUs
    wide = torch.promote_types(kept.dtype, torch.float32) if kept.dtype == torch.float16 else kept.dtype
    return (kept.to(wide).t() @ (mixed.to(wide) @ signs.to(wide))).float()


def _launch(kept: Tensor, mixed: Tensor, signs: Tensor | None, size: int, key: int) -> Tensor:
    t, n = mixed.shape
    wide = mixed.dtype == torch.float16  # norms leave its range before their elements do
    projected = torch.empty(t, size, dtype=torch.float32 if wide else mixed.dtype, device=mixed.device)
    block_s = max(16, power_of_two(size))
    block_t, block_n = (32, 32) if mixed.dtype == torch.float32 or wide else (64, 64)  # registers
    flags = signs is not None, wide or INTERPRETED
    sign_strides = (0, 0) if signs is None else signs.stride()
    _project_kernel[(cdiv(t, block_t),)](
        projected, mixed, signs, t, n, size, *mixed.stride(), *sign_strides, size**-0.5, *key_words(key), *flags,
        block_t, block_s, block_n,
    )  # fmt: skip
    return transposed_product(kept, projected, None, torch.float32, wide=wide)


@jit
def _project_kernel(
    out, x, signs, t, n, size, x_row, x_col, signs_row, signs_col, unit, key_low, key_high,
    GIVEN: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    sample = tl.arange(0, BLOCK_S)
    total = tl.zeros([BLOCK_T, BLOCK_S], dtype=tl.float32)
    for start in range(0, n, BLOCK_N):
        feature = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (token < t)[:, None] & (feature < n)[None, :]
        value = tl.load(x + token[:, None] * x_row + feature[None, :] * x_col, mask=inside, other=0.0)
        if GIVEN:
            place = signs + feature[:, None] * signs_row + sample[None, :] * signs_col
            s = tl.load(place, mask=(feature < n)[:, None] & (sample < size)[None, :], other=0.0)
        else:
            bits = random_bits_kernel(feature[:, None] * size + sample[None, :], key_low, key_high)
            s = 1.0 - 2.0 * (bits & 1).to(tl.float32)
        if WIDE:
            value = value.to(tl.float32)
        total = tl.dot(value, s.to(value.dtype), total, input_precision="ieee")
    if not GIVEN:
        total *= unit
    place = out + token[:, None] * size + sample[None, :]
    tl.store(place, narrowed(total, out.dtype.element_ty), mask=(token < t)[:, None] & (sample < size)[None, :])


_row_sketch = kernel_op(
    "row_sketch(Tensor kept, Tensor mixed, Tensor? signs, int size, int key) -> Tensor",
    twin=_twin,
    launch=_launch,
    fake=lambda kept, mixed, signs, size, key: kept.new_empty(kept.shape[1], size, dtype=torch.float32),
)
