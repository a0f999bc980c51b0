"""Products of matrices that are spread over a grid (SUMMA; Xu et al., 2021, arXiv 2104.05343, section 3.1).

Rank ``(i, j)`` of an ``a x b`` grid has of the input ``X (T, n)`` the block ``(T/a, n/b)`` and of the weight ``W (m,
n)`` the block ``(m/b, n/a)``. So the output ``Y = X W^T`` is spread as the input of the next layer is. Every product
gathers one operand along a row or a column, or sums the result over it::

    Y  = X W^T     X gathered along the row     W gathered along the column
    dX = dY W      summed over the row          W gathered along the column
    dW = dY^T X    X gathered along the row     summed over the column

Let ``a`` be a multiple of ``b``, ``k = a / b``: then the ``n/b`` features of an input block are those of ``k`` weight
blocks. Blocks travel in ``panels`` pieces of their ``n/a`` features; the next one is on its way while one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from grass.distributed.parallel_2d.mesh import Grid

T = TypeVar("T")


def product(grid: Grid, x: Tensor, weights: Callable[[int], Tensor]) -> Tensor:
    """``X W^T``: ``(t, n/b) -> (t, m/b)``; ``weights(p)`` is panel ``p`` of :func:`weight_panel`."""
    y: Tensor | None = None
    for xs, ws in ahead(lambda p: (input_panel(grid, x, p), weights(p)), grid.panels):
        for block, matrix in enumerate(ws):
            own = block_of(grid, xs, block)
            y = own @ matrix.t() if y is None else torch.addmm(y, own, matrix.t())
    assert y is not None
    return y


def input_gradient(grid: Grid, grad: Tensor, weights: Callable[[int], Tensor]) -> Tensor:
    """``dY W``: ``(t, m/b) -> (t, n/b)``."""
    parts = []
    for ws in ahead(weights, grid.panels):
        k, width = grid.rows // grid.columns, ws.shape[2]
        every = grad.new_empty(grid.columns, grad.shape[0], k, width)
        for block, matrix in enumerate(ws):
            block_of(grid, every, block).copy_(grad @ matrix)
        parts.append(grid.scatter_row(every))
    return torch.stack(parts, dim=2).flatten(1)


def weight_gradient(grid: Grid, x: Tensor, grad: Tensor) -> Tensor:
    """``dY^T X``: ``(t, n/b), (t, m/b) -> (m/b, n/a)``."""
    parts = [summed_product(grid, xs, grad) for xs in ahead(lambda p: input_panel(grid, x, p), grid.panels)]
    return torch.cat(parts, dim=1)


def summed_product(grid: Grid, xs: Tensor, grad: Tensor) -> Tensor:
    """``dY^T X`` of gathered features ``(b, t, k, w)``, summed over the column: this rank's ``(m/b, w)``."""
    every = grad.new_empty(grid.rows, grad.shape[1], xs.shape[3])
    for block, own in enumerate(every):
        torch.mm(grad.t(), block_of(grid, xs, block), out=own)
    return grid.scatter_column(every)


def input_panel(grid: Grid, x: Tensor, panel: int) -> Tensor:
    """Piece ``panel`` of the row's inputs: ``(t, n/b) -> (b, t, k, n/(a panels))``."""
    return grid.gather_row(x.view(x.shape[0], grid.rows // grid.columns, grid.panels, -1)[:, :, panel])


def weight_panel(grid: Grid, weight: Tensor, panel: int) -> Tensor:
    """Piece ``panel`` of the column's weights: ``(m/b, n/a) -> (a, m/b, n/(a panels))``, in the weight's own layout."""
    width = weight.shape[1] // grid.panels
    piece = weight.narrow(1, panel * width, width)
    if weight.stride(0) < weight.stride(1):  # stored by columns
        return grid.gather_column(piece.t()).transpose(1, 2)
    return grid.gather_column(piece)


def block_of(grid: Grid, every: Tensor, block: int) -> Tensor:
    """The features of weight block ``block`` in ``(b, t, k, w)``: ``(t, w)``; a view."""
    k = grid.rows // grid.columns
    return every[block // k, :, block % k]


def ahead(begin: Callable[[int], T], count: int) -> Iterator[T]:
    """What ``begin`` returns for each piece; the next one has begun before one is returned."""
    coming = begin(0)
    for piece in range(1, count + 1):
        current = coming
        if piece < count:
            coming = begin(piece)
        yield current
