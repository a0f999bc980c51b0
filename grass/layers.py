r"""Linear layers whose active rows are an ordinary parameter: the gradient of the full weight is never formed.

A converted layer computes ``y = x W^T + b`` as before, with ``W (m, n)`` frozen. Its parameter ``active`` holds the
selected rows ``W[sigma] (r, n)`` for ``dim=0``, or columns ``W[:, sigma] (m, r)`` for ``dim=1``; backward computes its
gradient directly (Muhamed et al., 2024, section 3.3):

======  =======================================  ====================  ===========
dim     gradient of ``active``                   saved for backward    FLOPs
======  =======================================  ====================  ===========
0       ``(g[:, sigma])^T x``, ``(r, n)``        ``x``                 ``2 b r n``
1       ``g^T x[:, sigma]``, ``(m, r)``          ``x[:, sigma]``       ``2 b m r``
======  =======================================  ====================  ===========

After an optimizer has stepped ``active``, :meth:`CompactLayer.write_back` copies it into ``W``.

To choose new rows a layer gathers a sketch of its gradient during one step: ``g^T (x S)`` for ``dim=0`` with
``S (n, s)``, ``x^T (g S)`` for ``dim=1`` with ``S (m, s)``. It arrives as the gradient of a leaf tensor beside the
parameters, so that it adds up over micro-batches as gradients do, under checkpointing and ``torch.compile`` too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grass.matmul import inner_product, picked_product, sketch_product
from grass.moments import source_rows
from grass.precision import shrink_
from grass.projector import Projector, select_columns
from grass.shards import local
from grass.weight_codes import decode_weight


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
        selected: Tensor,
        dim: int,
        sketch: Tensor | None,
        signs: Tensor | None,
    ) -> Tensor:
        ctx.dim, ctx.active_dtype = dim, active.dtype
        narrow = dim == 1 and sketch is None
        saved = select_columns(x, selected) if narrow else x
        ctx.narrow, ctx.sketching = narrow, sketch is not None
        ctx.save_for_backward(saved, weight, scale, selected, signs)
        return F.linear(x, _values(weight, scale, dim, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, selected, signs = ctx.saved_tensors
        grad_x = grad @ _values(weight, scale, ctx.dim, grad.dtype) if ctx.needs_input_grad[0] else None
        g, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_bias = g.sum(0) if ctx.needs_input_grad[3] else None
        if ctx.dim == 0:
            grad_active = picked_product(g, selected, x)
        else:  # transposed twice, for the layout of active
            grad_active = (inner_product(x, g) if ctx.narrow else picked_product(x, selected, g)).t()
        grad_sketch = None
        if ctx.sketching:
            grad_sketch = sketch_product(g, x, signs) if ctx.dim == 0 else sketch_product(x, g, signs)
        return grad_x, None, None, grad_bias, grad_active.to(ctx.active_dtype), None, None, grad_sketch, None


def _values(weight: Tensor, scale: Tensor | None, dim: int, dtype: torch.dtype) -> Tensor:
    """The weight that int8 codes stand for; one without a scale is that itself."""
    return weight if scale is None else decode_weight(weight, scale, dim, dtype)


class CompactLayer(nn.Module):
    """What converted layers share. Made by :func:`grass.compact`, never directly.

    Attributes:
        weight: the layer's weight, frozen, ``(m, n)`` (``Conv1D``: ``(n, m)``).
        active: the selected rows or columns of it, trainable, possibly in higher precision.
        selected: int64 ``(r,)``, their indices, ascending. A buffer that ``state_dict`` leaves out.
        dim: 0 for rows (output features), 1 for columns (input features).
    """

    weight: Any  # nn.Parameter; typed by the plain layers too
    bias: Any
    active: nn.Parameter
    selected: Tensor
    dim: int
    sketch: Tensor | None
    signs: Tensor | None
    norms: Tensor | None = None  # the gradient norms by which the rows were chosen
    weights: str | None = None  # "int8" in grass.int8
    stores_transposed = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and unpickled layers register themselves, so that a copied optimizer finds them."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        LAYERS.add(self)

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

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n)``, on every rank the whole weight's."""
        return self.weight.shape[self.weight_axis(0)], self.weight.shape[self.weight_axis(1)]

    def projector(self) -> Projector:
        """The projector onto the selected rows."""
        return Projector(self.selected, None, self.dim)

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
        scale = self.scale()
        if scale is None and not torch.is_grad_enabled():
            plain: Tensor = super().forward(x)
            return plain
        if hasattr(self.weight, "to_local"):
            raise TypeError("Tensor-parallel weights are for dense mode: a compact layer computes with whole weights")
        weight, bias = self.matrix(), self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
            weight = weight.to(dtype) if scale is None else weight
        rows = self.active, self.selected, self.dim
        y: Tensor = _CompactLinearFunction.apply(x, weight, scale, bias, *rows, self.sketch, self.signs)  # type: ignore[no-untyped-call]
        return y

    def gather(self, projector: Projector) -> Tensor:
        """The chosen rows of the weight."""
        return projector.gather(self.matrix())

    @torch.no_grad()
    def write_back(self, key: int | None = None) -> None:
        """Copy the active rows into the weight, with a ``key`` rounded stochastically where that has 8 bits."""
        self.projector().scatter_(self.matrix(), self.rows())

    def holds_active(self) -> bool:
        """Whether the weight's rows are what the active rows are written back as."""
        rows = self.gather(self.projector())
        return torch.equal(self.rows().to(rows.dtype), rows)

    def decay_(self, factor: float, key: int | None = None) -> None:
        """``W <- factor W``; a half-precision weight rounded stochastically where there is a ``key``."""
        shrink_(self.matrix(), factor, key)

    @torch.no_grad()
    def select(self, indices: Tensor) -> None:
        """Make ``indices (r,)`` the selected rows: those selected already keep their values."""
        indices = indices.to(self.selected.device)
        new = Projector(indices, None, self.dim)
        kept, source = source_rows(self.projector(), new, self.shape[self.dim])
        rows = self.gather(new).to(self.active.dtype)
        held = Projector(source, None, self.dim).gather(self.rows())
        self.rows().copy_(torch.where(new.along(kept), held, rows))
        self.selected.copy_(indices)

    @torch.no_grad()
    def reload(self) -> None:
        """Take the active rows from the weight."""
        self.rows().copy_(self.gather(self.projector()))

    @torch.no_grad()
    def restore(self, indices: Tensor, active: Tensor | None = None) -> None:
        """Return to a saved selection, with the saved values where the weight's precision cannot hold them."""
        self.end_sketch()
        self.selected.copy_(indices)
        if active is None:
            self.reload()
        else:
            self.rows().copy_(local(active))

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
        return f"{super().extra_repr()}, rank={self.selected.numel()}, dim={self.dim}{weights}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
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
        if not self.holds_active():  # else the finer master copy stays
            self.reload()


class CompactLinear(CompactLayer, nn.Linear):
    """A converted ``nn.Linear``."""

    plain_class: type[nn.Module] = nn.Linear
