"""Siblings: layers of one module with equally wide inputs, as the projections of queries, keys and values.

They often read one tensor. So they draw the same columns, and save one copy of these columns for backward instead of
one copy each. Whether two layers have indeed read one tensor, and have the same columns, is found out in every forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grass.kernels.layout import select_columns

SHARED = 1 << 23
"""Added to the places of siblings, so that no other layer draws as they do; above all positions of parameters."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules whose layers follow each other, or are unrelated."""


def draw_places(model: nn.Module, sizes: Mapping[str, Hashable], dim: int) -> dict[str, int]:
    """A number for each layer that keys its draws. Siblings share one, from :data:`SHARED` on; all others differ.

    Args:
        model: the layers are in it.
        sizes: of each layer by name: rows to draw from, selected and explored ones.
        dim: rows of ``dim=0`` are no inputs, so they have no siblings.
    """
    places = {name: index for index, name in enumerate(sizes)}
    if dim == 0:
        return places

    def family(name: str) -> tuple[str, str]:
        parent = name.rpartition(".")[0]
        return parent, name if isinstance(model.get_submodule(parent), _CONTAINERS) else repr(sizes[name])

    for _, names in groupby(sorted(sizes, key=lambda name: (family(name), places[name])), key=family):
        first, *others = names
        places.update({name: SHARED + places[first] for name in others})
        if others:
            places[first] += SHARED
    return places


class _Gathered(NamedTuple):
    """Columns that were gathered last: of which tensor, at which version, and what decided their indices."""

    source: weakref.ref[Tensor]
    version: int
    drawn: Hashable
    columns: weakref.ref[Tensor]
    dtype: torch.dtype


_LAST = threading.local()
"""``.gathered``: what this thread gathered last. Its references are weak, so that it keeps no tensor alive."""


def shared_columns(x: Tensor, chosen: Tensor, drawn: Hashable, dtype: torch.dtype) -> Tensor:
    """``x[..., chosen]`` in ``dtype``.

    It is differentiable, for ``create_graph=True``, unless ``torch.compile`` traces it.
    If a sibling has just gathered the same from the same ``x``, this is the sibling's tensor, so backward keeps one.

    Args:
        x: ``(..., n)``.
        chosen: int64 ``(k,)``.
        drawn: what decided ``chosen``; equal for equal indices.
        dtype: of the result, which autocast may set.
    """
    if torch.compiler.is_compiling() or x.is_inference():
        with torch.no_grad():
            plain: Tensor = select_columns(x, chosen).to(dtype)
        return plain
    last: _Gathered | None = getattr(_LAST, "gathered", None)
    columns: Tensor | None = None
    if last is not None and last.source() is x and last[1:3] == (x._version, drawn) and last.dtype is dtype:
        columns = last.columns()
    if columns is not None:
        return columns
    columns = _SelectColumns.apply(x, chosen).to(dtype)  # type: ignore[no-untyped-call]
    _LAST.gathered = _Gathered(weakref.ref(x), x._version, drawn, weakref.ref(columns), dtype)
    return columns


class _SelectColumns(torch.autograd.Function):
    """``x[..., chosen]``, which keeps nothing of ``x`` for its derivative: ``torch.gather`` would keep all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor) -> Tensor:
        """Gather."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(chosen)
        ctx.shape = x.shape
        columns: Tensor = select_columns(x, chosen)
        return columns

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """Scatter; ``grad`` is ``None`` unless a second derivative is taken."""
        if grad is None:
            return None, None
        (chosen,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add(-1, chosen, grad), None
