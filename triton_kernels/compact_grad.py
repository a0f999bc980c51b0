r"""The compact weight gradient: ``out[j, k] = sum_t g[t, sigma_j] x[t, k]`` for tokens ``t``.

``g (b, m), x (b, n) -> (r, n)``: :func:`.gather_cols` copies the chosen columns ``(b, r)``, a matrix product follows.
Gathering inside the product would read the scattered operand again for every block of 128 output columns.

Floor: ``2 b r n`` FLOPs; ``b n e`` bytes of ``e`` per element, what the gather reads, and ``r n e``.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import kernel_op
from .gather_rows import gather_cols


def compact_grad(g: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` of ``g^T x``.

    Args:
        g: ``(b, m)``, the output gradient. For columns of a weight gradient, pass the input here.
        x: ``(b, n)``, the input, of the same type.
        indices: int64 ``(r,)``, each in ``[0, m)``. Kernels do not check the range.

    Returns:
        ``(r, n)`` contiguous, in the type of the operands.
    """
    rows: Tensor = _compact_grad(g, x, indices)
    return rows


def _twin(g: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return g.index_select(1, indices).t() @ x


def _launch(g: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return gather_cols(g, indices).t() @ x


_compact_grad = kernel_op(
    "compact_grad(Tensor g, Tensor x, Tensor indices) -> Tensor",
    twin=_twin,
    launch=_launch,
    fake=lambda g, x, indices: g.new_empty(indices.numel(), x.shape[1]),
)
