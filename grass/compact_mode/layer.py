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
estimate of the whole gradient's squared norm. Their move has its length set, so the factor does not change it.

Forward computes with what ``active`` holds. :meth:`CompactLayer.sync` compares tensor versions and copies ``active``
into the weight, or the weight into ``active``, when one of them was changed from outside.

A rule that chooses rows by norm needs a sketch of the gradient: ``g^T (x S)`` for ``dim=0`` with ``S (n, s)``,
``x^T (g S)`` for ``dim=1`` with ``S (m, s)``. It arrives as the gradient of a leaf tensor beside the parameters, so it
adds up over micro-batches as gradients do, under checkpointing and ``torch.compile`` too.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grass.compact_mode.products import inner_product, picked_product, sketch_product
from grass.compact_mode.weight_codes import decode_weight
from grass.kernels.layout import select_columns
from grass.parallel.shards import is_sharded, local
from grass.selection.draws import draw_generator
from grass.selection.projector import Projector
from grass.state.moments import source_rows
from grass.state.precision import shrink_

logger = logging.getLogger("grass")

PROBES, ALWAYS = 8, -1
"""Forwards that look for changes through ``.data``."""

Stamp = tuple[int, int, int]
"""A tensor's identity, version and address: they differ after any change that PyTorch can see."""


class _Layers(weakref.WeakSet["CompactLayer"]):
    """Counts how often a layer was added."""

    additions = 0

    def add(self, item: CompactLayer) -> None:
        self.additions += 1
        super().add(item)


LAYERS = _Layers()
"""Every converted layer alive: an optimizer that was given parameters alone finds their layers here."""


class _CompactLinearFunction(torch.autograd.Function):
    """``x W^T + b`` with the gradients of the active rows and of the sketch in place of the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        active: Tensor,
        chosen: Tensor,
        dim: int,
        rank: int,
        reach: float,
        sketch: Tensor | None,
        signs: Tensor | None,
    ) -> Tensor:
        ctx.dim, ctx.active_dtype, ctx.rank, ctx.reach = dim, active.dtype, rank, reach
        narrow = dim == 1 and sketch is None
        saved = select_columns(x, chosen) if narrow else x
        ctx.narrow, ctx.sketching = narrow, sketch is not None
        ctx.save_for_backward(saved, weight, scale, chosen, signs)
        return F.linear(x, _values(weight, scale, dim, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, chosen, signs = ctx.saved_tensors
        grad_x = grad @ _values(weight, scale, ctx.dim, grad.dtype) if ctx.needs_input_grad[0] else None
        g, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_bias = g.sum(0) if ctx.needs_input_grad[3] else None
        if ctx.dim == 0:
            rows = picked_product(g, chosen, x)
        else:
            rows = inner_product(x, g) if ctx.narrow else picked_product(x, chosen, g)
        rows = rows.to(ctx.active_dtype)
        if ctx.reach:
            rows[ctx.rank :].mul_(ctx.reach)
        grad_sketch = None
        if ctx.sketching:
            grad_sketch = sketch_product(g, x, signs) if ctx.dim == 0 else sketch_product(x, g, signs)
        grad_active = rows if ctx.dim == 0 else rows.t()  # the layout of active
        return grad_x, None, None, grad_bias, grad_active, None, None, None, None, grad_sketch, None


def _values(weight: Tensor, scale: Tensor | None, dim: int, dtype: torch.dtype) -> Tensor:
    """The weight that int8 codes stand for; one without a scale is that itself."""
    return weight if scale is None else decode_weight(weight, scale, dim, dtype)


class CompactLayer(nn.Module):
    """What converted layers share. Made by :func:`grass.compact`, never directly.

    Attributes:
        weight: the layer's weight, frozen, ``(m, n)`` (``Conv1D``: ``(n, m)``).
        active: values of the selected and the explored rows, in this order; trainable, possibly in higher precision.
        chosen: int64 ``(r + q,)``, their indices, both parts ascending. A buffer that ``state_dict`` leaves out.
        rank: ``r``, the number of selected rows.
        reach: ``sqrt((n - r) / q)`` (:func:`grass.selection.exploration.reach`), 0 if no rows are explored.
        dim: 0 for rows (output features), 1 for columns (input features).
        first_draw: seed and place that the first rows are drawn with.
        norms: gradient norms that the rows were selected by, if any were computed.
        selections: how often rows were selected since the conversion.
        label: the layer's name in the model that was converted, for messages.
    """

    weight: Any  # nn.Parameter; typed by the plain layers too
    bias: Any
    active: nn.Parameter
    chosen: Tensor
    rank: int
    reach: float
    dim: int
    first_draw: tuple[int, int]
    sketch: Tensor | None
    signs: Tensor | None
    label: str = ""
    owner: Any = None  # grass.health.Owner: the optimizer that trains the active rows
    norms: Tensor | None = None
    selections: int = 0
    weights: str | None = None  # "int8" in grass.int8
    stores_transposed = False
    _synced: tuple[Stamp, Stamp] | None = None  # active's and weight's, when they were known to agree
    _sharded = False
    _probes = PROBES

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and unpickled layers register themselves, so that a copied optimizer finds them."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        LAYERS.add(self)

    @property
    def selected(self) -> Tensor:
        """int64 ``(r,)``: the rows that have optimizer state; a view."""
        return self.chosen[: self.rank]

    @property
    def explored(self) -> Tensor:
        """int64 ``(q,)``: the rows that move without state in this step; a view."""
        return self.chosen[self.rank :]

    def matrix(self) -> Tensor:
        """The weight as an ``(m, n)`` view, output features first, detached; of a sharded one this rank's part."""
        matrix = local(self.weight.detach())
        return matrix.t() if self.stores_transposed else matrix

    def weight_axis(self, dim: int) -> int:
        """The dimension of ``weight`` that is dimension ``dim`` of the matrix."""
        return dim ^ self.stores_transposed

    def rows(self) -> Tensor:
        """The values of ``active``, detached; of sharded ones this rank's part."""
        return local(self.active.detach())

    def selected_part(self, rows: Tensor) -> Tensor:
        """What belongs to the selected rows in a tensor shaped like ``active``; a view."""
        return rows if rows.shape[self.dim] == self.rank else rows.narrow(self.dim, 0, self.rank)

    def explored_part(self, rows: Tensor) -> Tensor:
        """What belongs to the explored rows in a tensor shaped like ``active``; a view."""
        return rows.narrow(self.dim, self.rank, rows.shape[self.dim] - self.rank)

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n)``, on every rank the whole weight's."""
        return self.weight.shape[self.weight_axis(0)], self.weight.shape[self.weight_axis(1)]

    def projector(self) -> Projector:
        """The projector onto the selected rows."""
        return Projector(self.selected, None, self.dim)

    def active_projector(self) -> Projector:
        """The projector onto the selected and the explored rows."""
        return Projector(self.chosen, None, self.dim)

    def set_matrix(self, matrix: Tensor) -> None:
        """Make ``matrix (m, n)`` the weight's storage, in whatever memory layout it comes."""
        self.weight.data = matrix.t() if self.stores_transposed else matrix

    def scale(self) -> Tensor | None:
        """By which the weight's rows (``dim=1``: columns) are to be multiplied; ``None`` if it holds plain values."""
        return None

    def store(self, matrix: Tensor) -> None:
        """Begin to hold the values ``matrix (m, n)``."""
        self.set_matrix(matrix)

    def unconvert(self) -> None:
        """Hold plain values, with the active rows among them."""
        self.write_back()

    def forward(self, x: Tensor) -> Tensor:
        """``x (..., n) -> (..., m)``; without gradients it is the plain layer's own forward."""
        if isinstance(x, torch.fx.Proxy):  # type: ignore[unreachable]
            raise TypeError("torch.fx cannot trace converted layers: call grass.expand(model) first")
        self.sync(probe=torch.is_grad_enabled())
        scale = self.scale()
        if scale is None and not torch.is_grad_enabled():
            plain: Tensor = super().forward(x)
            return plain
        if is_sharded(self.weight):
            raise TypeError("Tensor-parallel weights are for dense mode: a compact layer computes with whole weights")
        weight, bias = self.matrix(), self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
            weight = weight.to(dtype) if scale is None else weight
        rows = self.active, self.chosen, self.dim, self.rank, self.reach
        y: Tensor = _CompactLinearFunction.apply(x, weight, scale, bias, *rows, self.sketch, self.signs)  # type: ignore[no-untyped-call]
        return y

    def train(self, mode: bool = True) -> CompactLayer:
        """Also looks for changes through ``.data``, which tensor versions do not show."""
        if mode != self.training:
            self.sync(compare=True)
        super().train(mode)
        return self

    @torch.no_grad()
    def sync(self, *, compare: bool = False, probe: bool = False) -> None:
        """Make weight and active rows agree after one of them was changed from outside.

        A changed ``active`` is copied into the weight. A changed weight is copied into ``active``; it also wins where
        both were changed, as by averaging all parameters of a model. Compiled code and sharded layers skip this check.

        Args:
            compare: compare values even if tensor versions show no change.
            probe: compare the first active row in the first few calls.
        """
        if torch.compiler.is_compiling() or self._sharded:
            return
        now = self._stamps()
        if now is None or (now == self._synced and not compare and not (probe and self._changed_unseen())):
            return
        if not self.holds_active():
            if now == self._synced:
                self._probes = ALWAYS
                logger.warning(
                    "Grass: %s was changed through .data; its active rows are copied to the weight", self.label
                )
            if self._synced is not None and self._synced[1] != now[1]:
                self.reload()
            else:
                self.write_back()
        self._synced = self._stamps()

    def _changed_unseen(self) -> bool:
        """Whether the first active row differs from the weight's, as after ``p.data -= p.grad``.

        Versions do not show such changes. The first forwards look for them, and all later ones if one was found.
        """
        if self._probes == 0:
            return False
        if self._probes > 0:
            self._probes -= 1
        first = Projector(self.chosen[:1], None, self.dim)
        row = self.gather(first)
        return not torch.equal(self.rows().narrow(self.dim, 0, 1).to(row.dtype), row)

    def mark_synced(self) -> None:
        """Note that weight and active rows agree."""
        self.__dict__.update(_sharded=is_sharded(self.weight), _synced=self._stamps())

    def _stamps(self) -> tuple[Stamp, Stamp] | None:
        """Of ``active`` and weight; ``None`` for tensors that have no memory of their own here (sharded, fake)."""
        active, weight = self._parameters.get("active"), self._parameters.get("weight")
        if weight is None:
            raise RuntimeError(
                f"The weight of the converted layer {self.label!r} is no longer its parameter: apply weight_norm and "
                "other parametrizations before grass.compact(), which then leaves the layer at full rank"
            )
        if type(active) is not nn.Parameter or type(weight) is not nn.Parameter or active.is_meta:
            return None
        return (id(active), active._version, active.data_ptr()), (id(weight), weight._version, weight.data_ptr())

    def gather(self, projector: Projector) -> Tensor:
        """The chosen rows of the weight."""
        return projector.gather(self.matrix())

    @torch.no_grad()
    def write_back(self, key: int | None = None) -> None:
        """Copy the active rows into the weight, with a ``key`` rounded stochastically if that has 8 bits."""
        self.active_projector().scatter_(self.matrix(), self.rows())

    def holds_active(self) -> bool:
        """Whether the weight's rows are what the active rows are written back as."""
        rows = self.gather(self.active_projector())
        return torch.equal(self.rows().to(rows.dtype), rows)

    def decay_(self, factor: float, key: int | None = None) -> None:
        """``W <- factor W``; a half-precision weight rounded stochastically where there is a ``key``."""
        shrink_(self.matrix(), factor, key)

    @torch.no_grad()
    def select(self, indices: Tensor) -> None:
        """Make ``indices (r,)`` the selected rows: those selected already keep their values.

        Call :meth:`explore` afterwards: explored rows may be among them.
        """
        indices = indices.to(self.chosen.device)
        new = Projector(indices, None, self.dim)
        kept, source = source_rows(self.projector(), new, self.shape[self.dim])
        own = self.selected_part(self.rows())
        rows = self.gather(new).to(own.dtype)
        held = Projector(source, None, self.dim).gather(own)
        own.copy_(torch.where(new.along(kept), held, rows))
        self.selected.copy_(indices)
        self.selections += 1

    @torch.no_grad()
    def explore(self, indices: Tensor) -> None:
        """Make ``indices (q,)`` the explored rows, with the weight's values."""
        self.explored.copy_(indices)
        self.explored_part(self.rows()).copy_(self.gather(Projector(self.explored, None, self.dim)))

    @torch.no_grad()
    def reload(self) -> None:
        """Take the active rows from the weight."""
        self.rows().copy_(self.gather(self.active_projector()))

    @torch.no_grad()
    def restore(self, indices: Tensor, explored: Tensor | None, values: Tensor | None = None) -> None:
        """Return to saved selected and explored rows, with saved values where the weight's precision cannot hold them.

        ``explored=None`` leaves the explored rows as they were drawn by the conversion.
        """
        self.end_sketch()
        self.selected.copy_(indices)
        if explored is not None:
            self.explored.copy_(explored)
        self.reload()
        if values is not None:
            self.selected_part(self.rows()).copy_(local(values))
        self.mark_synced()

    def draw_first(self) -> Tensor:
        """The rows that a conversion chooses, uniformly: int64 ``(r + q,)`` on the CPU."""
        size, count = self.shape[self.dim], self.chosen.numel()
        order = torch.randperm(size, generator=draw_generator(*self.first_draw))
        return torch.cat([order[: self.rank].sort().values, order[self.rank : count].sort().values])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompactLayer:
        """Draws the first rows again when a layer leaves the meta device, where indices have no values."""
        was_meta = self.chosen.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.chosen.is_meta:
            self.chosen.copy_(self.draw_first())
        return self

    def begin_sketch(self, signs: Tensor | None) -> None:
        """Gather ``G S`` from the next forward on; ``signs`` is ``S``, or ``None`` for the gradient itself."""
        width = self.shape[1 - self.dim] if signs is None else signs.shape[1]
        self.signs = signs
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.weight.device, "requires_grad": True}
        self.sketch = torch.zeros(self.shape[self.dim], width, **options)

    def clear_sketch(self) -> None:
        """Drop what has been gathered, as gradients are dropped."""
        if self.sketch is not None:
            self.sketch.grad = None

    def end_sketch(self) -> Tensor:
        """Stop gathering; returns the sketched rows, zero where no backward has run."""
        sketch, self.sketch, self.signs = self.sketch, None, None
        if sketch is None:
            return torch.zeros(self.shape[self.dim], 1, dtype=torch.float32, device=self.weight.device)
        return torch.zeros_like(sketch) if sketch.grad is None else sketch.grad

    def extra_repr(self) -> str:
        """The plain layer's, with rank and dim."""
        weights = f", weights={self.weights}" if self.weights else ""
        return f"{super().extra_repr()}, {self.rows_repr()}{weights}"

    def rows_repr(self) -> str:
        """Rank, dim and how many rows are explored, as keyword arguments."""
        explored = len(self.explored)
        return f"rank={self.rank}, dim={self.dim}" + (f", explore={explored}" if explored else "")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.sync()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}active"]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(*arguments)
        if f"{prefix}active" in missing_keys:
            missing_keys.remove(f"{prefix}active")
        if self.rows().is_meta:
            raise RuntimeError(
                "A converted layer on the meta device has lost its active rows: load weights before grass.compact(), "
                "and with accelerate choose FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)"
            )
        if not self.holds_active():  # otherwise the finer master copy stays
            self.reload()
        self.mark_synced()


class CompactLinear(CompactLayer, nn.Linear):
    """A converted ``nn.Linear``."""

    plain_class: type[nn.Module] = nn.Linear
