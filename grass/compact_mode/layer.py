r"""Linear layers whose active rows are an ordinary parameter: the gradient of the full weight is never formed.

A converted layer computes ``y = x W^T + b`` with ``W (m, n)`` frozen. It trains ``r`` selected rows, which have
optimizer state, and ``q`` explored rows, which do not (:mod:`grass.selection.exploration`). Their indices are
``sigma``, selected rows first. The parameter ``active`` holds their values: ``W[sigma] (r + q, n)`` for ``dim=0``, or
columns ``W[:, sigma] (m, r + q)`` for ``dim=1``. Backward computes its gradient directly (Muhamed et al., 2024, section
3.3):

======  ===========================================  ====================  =================
dim     gradient of ``active``                       saved for backward    FLOPs
======  ===========================================  ====================  =================
0       ``(g[:, sigma])^T x``, ``(r + q, n)``        ``x``                 ``2 b (r + q) n``
1       ``g^T x[:, sigma]``, ``(m, r + q)``          ``x[:, sigma]``       ``2 b m (r + q)``
======  ===========================================  ====================  =================

The gradient of explored rows is multiplied by ``sqrt((n - r) / q)``, so that gradient clipping sees an unbiased
estimate of the whole gradient's squared norm. It does not change their move, whose length is set.

A rule that chooses rows by norm needs a sketch of the gradient: ``g^T (x S)`` for ``dim=0`` with ``S (n, s)``,
``x^T (g S)`` for ``dim=1`` with ``S (m, s)``. It arrives as the gradient of a leaf tensor beside the parameters. So it
adds up over micro-batches as gradients do, also under checkpointing and ``torch.compile``.

The parts of a layer: :mod:`~grass.compact_mode.active_rows`, :mod:`~grass.compact_mode.synced_rows` (weight and active
rows agree), :mod:`~grass.compact_mode.saved_rows` and :mod:`~grass.compact_mode.linear_function` (backward).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.columns import saved_columns
from grass.compact_mode.linear_function import CompactLinearFunction
from grass.compact_mode.saved_rows import SavedRows
from grass.parallel.shards import TENSOR_PARALLEL, is_sharded, is_tensor_parallel, local
from grass.state.precision import shrink_
from grass.state.schema import State


class _Layers(weakref.WeakSet["CompactLayer"]):
    """Counts how often a layer was added."""

    additions = 0

    def add(self, item: CompactLayer) -> None:
        self.additions += 1
        super().add(item)


LAYERS = _Layers()
"""Every converted layer alive."""


class CompactLayer(SavedRows):
    """What converted layers share. :func:`grass.compact` makes them; do not construct one.

    Attributes:
        weight: the layer's weight, frozen, ``(m, n)`` (``Conv1D``: ``(n, m)``).
        active: values of the selected and the explored rows, in this order; trainable, possibly in higher precision.
        chosen: int64 ``(r + q,)``, their indices, both parts ascending. A buffer that ``state_dict`` leaves out.
        rank: ``r``, the number of selected rows.
        reach: how many times as far as the selected rows the explored rows move
            (:func:`grass.selection.exploration.reach`); 0 if no rows are explored.
        gradient_scale: multiplies the gradient of the explored rows.
        dim: 0 for rows (output features), 1 for columns (input features).
        first_draw: seed and place that the first rows are drawn with.
        norms: gradient norms that the rows were selected by, if any were computed.
        selections: how often rows were selected since the conversion.
        label: the layer's name in the model that was converted, for messages.
    """

    bias: Any
    sketch: Tensor | None
    signs: Tensor | None
    owner: Any = None  # grass.compact_mode.owner.Owner: the optimizer that trains the active rows
    norms: Tensor | None = None
    gathered: Tensor | None = None  # a sketch that has ended, for a step that is on its way
    weights: str | None = None  # "int8" in grass.int8
    tensor_parallel = False  # whether parallelize_module has divided it, before the conversion
    sums_sketch = False  # whether end_sketch() returns what all ranks have gathered

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copied and unpickled layers register themselves, so that a copied optimizer finds them."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.freeze()
        LAYERS.add(self)

    def saved_state(self, state: State) -> State:
        """The optimizer's state of a layer with strata, as that of the whole weight."""
        raise NotImplementedError

    def held_state(self, state: State) -> State:
        """This rank's part of what :meth:`saved_state` has returned."""
        raise NotImplementedError

    def scale(self) -> Tensor | None:
        """A factor for each of the weight's rows (``dim=1``: columns); ``None`` if the weight holds plain values."""
        return None

    def store(self, matrix: Tensor) -> None:
        """Make ``matrix (m, n)`` the layer's values."""
        self.set_matrix(matrix)

    def unconvert(self) -> None:
        """Write the values, active rows included, into a plain weight."""
        self.sync()
        self.write_back()

    def forward(self, x: Tensor) -> Tensor:
        """``x (..., n) -> (..., m)``; without gradients this is the plain layer's own forward."""
        if isinstance(x, torch.fx.Proxy):  # type: ignore[unreachable]
            raise TypeError("torch.fx cannot trace converted layers: call grass.expand(model) first")
        if is_tensor_parallel(self) and not self.tensor_parallel:
            raise TypeError(TENSOR_PARALLEL)
        self.sync(probe=torch.is_grad_enabled())
        if self.scale() is None and not torch.is_grad_enabled():
            plain: Tensor = super().forward(x)
            return plain
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """:meth:`forward` for autograd."""
        if is_sharded(self.weight):
            raise TypeError(
                f"The weight of {self.label!r} is a DTensor in forward: a compact layer takes whole weights"
            )
        return self.product(x, self.bias, self.active)

    def product(self, x: Tensor, bias: Tensor | None, active: Tensor) -> Tensor:
        """``x W^T + b`` of the weight here, with the gradient of the active rows."""
        weight, scale = self.matrix(), self.scale()
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
            weight = weight.to(dtype) if scale is None else weight
        rows = active, self.chosen, self.dim, self.rank, self.gradient_scale
        columns = saved_columns(x, self.chosen) if self.dim == 1 and self.sketch is None else None
        y: Tensor = CompactLinearFunction.apply(x, columns, weight, scale, bias, *rows, self.sketch, self.signs)  # type: ignore[no-untyped-call]
        return y

    def decay_(self, factor: float, key: int | None = None) -> None:
        """``W <- factor W``. With a ``key``, a half-precision weight is rounded stochastically."""
        shrink_(self.stored(), factor, key)

    @torch.no_grad()
    def restore(self, indices: Tensor, explored: Tensor | None, values: Tensor | None = None) -> None:
        """Return to saved selected and explored rows, with saved values where the weight's precision cannot hold them.

        ``explored=None`` leaves the explored rows as they were drawn by the conversion.
        """
        self.end_sketch()
        self.finish_writing()
        self.selected.copy_(indices)
        if explored is not None:
            self.explored.copy_(explored)
        self.reload()
        if values is not None:
            self.selected_part(self.rows()).copy_(local(values))
        self.mark_synced()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompactLayer:
        """Draws the first rows again when a layer leaves the meta device, where indices have no values."""
        self.finish_writing()
        was_meta = self.chosen.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.chosen.is_meta:
            self.chosen.copy_(self.draw_first())
            self._empty = True
        return self

    def begin_sketch(self, signs: Tensor | None) -> None:
        """Gather ``G S`` from the next forward on; ``signs`` is ``S``. ``None`` gathers the gradient itself."""
        width = self.shape[1 - self.dim] if signs is None else signs.shape[1]
        self.signs = signs
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.weight.device, "requires_grad": True}
        self.sketch = torch.zeros(self.shape[self.dim], width, **options)

    def clear_sketch(self) -> None:
        """Drop what has been gathered, as ``zero_grad`` drops gradients."""
        if self.sketch is not None:
            self.sketch.grad = None

    def end_sketch(self) -> Tensor:
        """Stop gathering; returns the sketched rows, zero where no backward has run."""
        if self.gathered is not None:
            gathered, self.gathered = self.gathered, None
            return gathered
        sketch, self.sketch, self.signs = self.sketch, None, None
        if sketch is None:
            return torch.zeros(self.shape[self.dim], 1, dtype=torch.float32, device=self.weight.device)
        return torch.zeros_like(sketch) if sketch.grad is None else sketch.grad

    def extra_repr(self) -> str:
        """The plain layer's text, with rank and dim."""
        weights = f", weights={self.weights}" if self.weights else ""
        return f"{super().extra_repr()}, {self.rows_repr()}{weights}"


class CompactLinear(CompactLayer, nn.Linear):
    """A converted ``nn.Linear``."""

    plain_class: type[nn.Module] = nn.Linear


Layers = dict[int, CompactLayer]
"""Converted layers by the ``id`` of their active rows."""
