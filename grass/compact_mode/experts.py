r"""Experts whose active rows are parameters: the gradients of full weights are never formed.

A module of experts holds weights ``(E, m, n)``, one matrix for each expert. :class:`ExpertRows` stands beside each such
weight. It is a converted layer (:mod:`grass.compact_mode.layer`) of one matrix, the experts beside each other: with
``dim=0`` ``E m`` rows of ``n`` values, with ``dim=1`` ``E n`` columns of ``m``. Each expert has ``r`` selected and
``q`` explored ones. So state, refresh and exploration are those of any converted layer. Backward computes for each
expert::

    dim=0   (g_e[:, sigma_e])^T x_e        (r + q, n)
    dim=1   g_e^T x_e[:, sigma_e]          (m, r + q)

from the tokens ``x_e`` that were sent to it. The weight stays a frozen parameter of the module, under its own name.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from grass.compact_mode.grouped import experts_of_tokens, grouped_inner_product, grouped_product
from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.linear_function import differentiable_once, saved_of
from grass.compact_mode.weight_codes import decode_weight
from grass.coverage import EXPERT_ROWS
from grass.parallel.shards import is_sharded, local
from grass.selection.exploration import first_rows
from grass.selection.projector import Projector
from grass.targets import expert_weights


class ExpertRows(CompactLayer):
    """The active rows of one weight of a module of experts. :func:`grass.compact` makes it.

    Attributes:
        experts: how many, ``E``; of divided ones those of this rank.
        transposed: whether the weight is stored as ``(E, n, m)``, inputs first.
    """

    transposed: bool
    is_batch = True

    def __init__(self, weight: nn.Parameter, dim: int, transposed: bool) -> None:
        super().__init__()
        self.weight, self.dim, self.transposed = weight, dim, transposed
        self.bias = None
        self.experts = local(weight).shape[0]

    @classmethod
    def of(cls, module: nn.Module, name: str) -> ExpertRows | None:
        """The active rows of a module's weight, ready for a forward; ``None`` if it is not converted."""
        every = module._modules.get(EXPERT_ROWS)
        if every is None or name not in every._modules:
            return None
        rows: Any = every._modules[name]
        if not rows.holds_weight:
            rows.bind(module._parameters[name])
        return rows  # type: ignore[no-any-return]

    def bind(self, weight: Any) -> None:
        """Take over the module's weight if it was replaced, as by a move from the meta device."""
        if self._parameters["weight"] is not weight:
            self._parameters["weight"] = weight

    @property
    def holds_weight(self) -> bool:
        """Whether the weight is a parameter of this module and not of the module of experts: codes are."""
        return self.weights is not None

    @property
    def by_rows(self) -> bool:
        """Whether the stored matrix of an expert has a row for each row or column that can be selected."""
        return (self.dim == 1) == self.transposed

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix of all experts beside each other."""
        size, width = self.weight.shape[1:] if self.by_rows else self.weight.shape[:0:-1]
        return (self.experts * size, width) if self.dim == 0 else (width, self.experts * size)

    def weight_axis(self, dim: int) -> int:
        """The dimension of ``weight`` that is dimension ``dim`` of an expert's matrix."""
        return 1 + (dim ^ self.transposed)

    def as_matrix(self, weight: Tensor) -> Tensor:
        """The experts beside each other; a view if the weight is stored :attr:`by_rows`, otherwise a copy."""
        rows = (weight if self.by_rows else weight.transpose(1, 2)).flatten(0, 1)
        return rows if self.dim == 0 else rows.t()

    def plain_matrix(self) -> Tensor | None:
        """As :meth:`CompactLayer.plain_matrix`: :meth:`matrix` may be a copy."""
        return super().plain_matrix() if self.by_rows else None

    def take(self, weight: Tensor, projector: Projector, out: Tensor | None = None) -> Tensor:
        """As :meth:`ActiveRows.take`."""
        if self.by_rows:
            return super().take(weight, projector, out)
        rows = weight.transpose(0, 1)[:, *self._places(projector)]
        rows = rows if self.dim == 1 else rows.t()
        return rows if out is None else out.copy_(rows)

    def take_probed(self, weight: Tensor) -> list[Tensor]:
        """As :meth:`ActiveRows.take_probed`."""
        if self.by_rows:
            return super().take_probed(weight)
        return [self.take(weight, Projector(self.chosen[i : i + 1], None, self.dim)) for i in self.probed()]

    def put(self, weight: Tensor, projector: Projector, rows: Tensor) -> None:
        """As :meth:`ActiveRows.put`."""
        if self.by_rows:
            super().put(weight, projector, rows)
        else:
            rows = (rows if self.dim == 1 else rows.t()).to(weight.dtype)
            weight.transpose(0, 1)[:, *self._places(projector)] = rows

    def _places(self, projector: Projector) -> tuple[Tensor, Tensor]:
        """The expert of each chosen row, and which of its rows it is."""
        indices, size = projector.indices, self.shape[self.dim] // self.experts
        return indices // size, indices % size

    def matrix_of(self, expert: int) -> Tensor:
        """One expert's ``(m, n)``, a view."""
        weight = self.stored()[expert]
        return weight.t() if self.transposed else weight

    def keep_plain(self, matrix: Tensor) -> None:
        """Keep the weight as it is, without gaps; ``matrix`` may be a copy."""
        self.keep(self.stored())

    def set_matrix(self, matrix: Tensor) -> None:
        """Make the values of a matrix of all experts the weight's."""
        self.keep(self.as_stored(matrix))

    def keep(self, weight: Tensor) -> None:
        """Make values in the weight's layout its storage, without gaps."""
        self.weight.data = weight.contiguous()

    def as_stored(self, matrix: Tensor) -> Tensor:
        """A matrix of all experts as ``(E, m, n)`` or ``(E, n, m)``: the inverse of :meth:`as_matrix`."""
        rows = (matrix if self.dim == 0 else matrix.t()).reshape(self.experts, -1, matrix.shape[1 - self.dim])
        return rows if self.by_rows else rows.transpose(1, 2)

    def matrices(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``(E, n, m)``: what the tokens of each expert are multiplied by; a view, or decoded."""
        if scale is not None:
            weight = decode_weight(weight, scale.view(self.experts, -1), 1 - self.by_rows, dtype)
        return weight if self.transposed else weight.transpose(1, 2)

    def precision(self, x: Tensor) -> torch.dtype:
        """The dtype of products with tokens ``x``: the weight's, or that of ``x`` where it is stored as codes."""
        dtype: torch.dtype = x.dtype if self.holds_weight else self.weight.dtype
        return dtype

    @torch.compiler.disable(reason="each expert's tokens depend on the data")  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """``x_e W_e^T`` of each expert, in the precision of the weight, as transformers does it also under autocast.

        Args:
            x: ``(t, n)``, tokens sorted by expert.
            ends: ``(E,)``, where each expert's tokens end. Tokens behind the last one get zeros.

        Returns:
            ``(t, m)``.
        """
        self.follow(probe=torch.is_grad_enabled())
        x, weight, scale = x.to(self.precision(x)).contiguous(), local(self.weight.detach()), self.scale()
        if not torch.is_grad_enabled():
            return grouped_product(x, self.matrices(weight, scale, x.dtype), ends)
        y: Tensor = _ExpertFunction.apply(
            x, weight, scale, ends, local(self.active), self, self.fed_sketch(), self.signs
        )  # type: ignore[no-untyped-call]
        return y

    def chosen_of_each(self) -> Tensor:
        """int64 ``(E, r + q)``: the active rows of each expert, counted from its own first."""
        parts = [part.view(self.experts, -1) for part in self.chosen.split_with_sizes(self.counts())]
        first: Tensor = first_rows(self.experts, self.shape[self.dim], self.chosen.device)
        return torch.cat(parts, dim=1) - first

    def beside_each_other(self, rows: Tensor) -> Tensor:
        """``(E, r + q, n)``, or for ``dim=1`` ``(E, m, r + q)``, as ``active``: all selected rows first."""
        counts = [count // self.experts for count in self.counts()]
        parts = rows.split_with_sizes(counts, 1 + self.dim)
        if self.dim == 0:
            return torch.cat([part.flatten(0, 1) for part in parts])
        return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1)

    def weight_key(self, prefix: str) -> str:
        """The module's own name for the weight."""
        return prefix.replace(f"{EXPERT_ROWS}.", "").removesuffix(".")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Codes and scales, under the name of this submodule; otherwise the module has put its weight there."""
        if self.holds_weight:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        else:
            self.before_saving()  # writes the values of the weight that is in the dict

    def _load_from_state_dict(self, *args: Any) -> None:
        if self.holds_weight:
            super()._load_from_state_dict(*args)
            return
        self.before_loading()
        self.reload_changed()
        self.mark_synced()

    def extra_repr(self) -> str:
        """Experts, rank of each, and dim."""
        r, q = (count // self.experts for count in self.counts())
        return f"experts={self.experts}, rank={r}, dim={self.dim}, explore={q}"


class _ExpertFunction(torch.autograd.Function):
    """``x_e W_e^T`` of all experts; backward computes gradients of the input, the active rows and the sketch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        ends: Tensor,
        active: Tensor,
        layer: ExpertRows,
        sketch: Tensor | None,
        signs: Tensor | None,
    ) -> Tensor:
        """Multiply; save what backward needs."""
        ctx.layer, ctx.sketching = layer, sketch is not None
        ctx.gradient_scale, ctx.active_dtype = layer.gradient_scale, active.dtype
        ctx.narrow = layer.dim == 1 and sketch is None
        indices = layer.chosen_of_each()
        saved = _pick(x, indices, ends) if ctx.narrow else x
        ctx.save_for_backward(saved, weight, scale, ends, indices, signs)
        return grouped_product(x, layer.matrices(weight, scale, x.dtype), ends)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, active rows and sketch."""
        x, weight, scale, ends, indices, signs = saved_of(ctx)
        layer, grad_x, grad = ctx.layer, None, grad.contiguous()  # that of a sum has no strides
        if ctx.needs_input_grad[0]:
            grad_x = grouped_product(grad, layer.matrices(weight, scale, grad.dtype).transpose(1, 2), ends)
        if layer.dim == 0:
            kept, mixed = grad, x
            rows = grouped_inner_product(_pick(grad, indices, ends), x, ends)
        else:
            kept, mixed = x, grad
            rows = grouped_inner_product(grad, x if ctx.narrow else _pick(x, indices, ends), ends)
        rows = layer.beside_each_other(rows.to(ctx.active_dtype))
        if ctx.gradient_scale != 1.0:
            layer.explored_part(rows).mul_(ctx.gradient_scale)
        grad_sketch = None
        if ctx.sketching:
            mixed = mixed if signs is None else mixed @ signs.to(mixed.dtype)
            grad_sketch = grouped_inner_product(kept.float(), mixed.float(), ends).flatten(0, 1)
        return grad_x, None, None, None, rows, None, grad_sketch, None


def _pick(x: Tensor, indices: Tensor, ends: Tensor) -> Tensor:
    """Pick from each token the columns that its expert has chosen: ``(t, k), (E, r) -> (t, r)``."""
    return x.gather(1, indices[experts_of_tokens(ends, x.shape[0])])


def expert_linear(module: nn.Module, name: str, x: Tensor, ends: Tensor | None = None) -> Tensor:
    r"""``x_e W_e^T`` of each expert, with or without active rows. For modules of experts of your own.

    A class names its weights in ``grass_experts``, with ``True`` for those stored inputs first, ``(E, n, m)``::

        class Experts(nn.Module):
            grass_experts = {"up": False, "down": False}

            def forward(self, x):  # (E, tokens, n)
                return grass.expert_linear(self, "down", grass.expert_linear(self, "up", x).relu())

    :func:`grass.compact` and :func:`grass.param_groups` then take the weights like linear layers.

    Where ranks divide the experts, those of this rank compute: ``E`` is their number.

    Args:
        module: has the weight.
        name: of the weight, ``(E, m, n)``.
        x: ``(t, n)``, tokens sorted by expert, or ``(E, t, n)``, equally many for each.
        ends: ``(E,)`` integers, where each expert's tokens end in ``(t, n)``: ``counts.cumsum(0)`` of the numbers of
            tokens. Tokens behind the last get zeros.

    Returns:
        ``(t, m)`` or ``(E, t, m)``.

    Raises:
        ValueError: the module does not name the weight, or shapes do not fit.
        TypeError: ``ends`` is no tensor of integers, or converted experts were divided among ranks afterwards.
    """
    named = expert_weights(module)
    if name not in named:
        raise ValueError(
            f"Invalid {name=}: {type(module).__name__} names {', '.join(named) or 'no'} weights of experts"
        )
    rows = _rows_in_forward(module, name)
    experts = local(module._parameters[name]).shape[0] if rows is None else rows.experts  # type: ignore[arg-type]
    if (x.ndim == 3) != (ends is None) or x.ndim not in (2, 3):
        raise ValueError(f"x must be (t, n) with ends, or (E, t, n) without: got shape {tuple(x.shape)}")
    if ends is None:
        if x.shape[0] != experts:
            raise ValueError(f"x of shape {tuple(x.shape)} is not of {experts} experts")
        ends = torch.arange(1, x.shape[0] + 1, device=x.device) * x.shape[1]
        y = expert_product(module, name, x.flatten(0, 1), ends)
        return y.view(*x.shape[:2], y.shape[1])
    if not isinstance(ends, Tensor) or ends.is_floating_point():
        raise TypeError(f"Invalid ends={ends!r}: must be a tensor of integers, the cumulated numbers of tokens")
    if ends.shape != (experts,):
        raise ValueError(f"ends of shape {tuple(ends.shape)} is not of {experts} experts")
    if ends.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_ends(ends, x.shape[0])
    return expert_product(module, name, x, ends)


def expert_product(module: nn.Module, name: str, x: Tensor, ends: Tensor) -> Tensor:
    """:func:`expert_linear` of tokens ``(t, n)`` that are known to fit."""
    rows = _rows_in_forward(module, name)
    if rows is not None:
        product: Tensor = rows(x, ends)
        return product
    weight = local(module._parameters[name])  # type: ignore[arg-type]
    x, stored_transposed = x.to(weight.dtype), expert_weights(module)[name]
    matrices = weight if stored_transposed else weight.transpose(1, 2)
    limits = [0, *ends.tolist()]
    every = [x[a:b] @ matrix for matrix, (a, b) in zip(matrices, pairwise(limits), strict=True)]
    behind = x.new_zeros(x.shape[0] - limits[-1], matrices.shape[2], dtype=every[0].dtype)
    return torch.cat([*every, behind])


def _rows_in_forward(module: nn.Module, name: str) -> ExpertRows | None:
    """The active rows of a module's weight, which must be here as they were converted."""
    rows = ExpertRows.of(module, name)
    if rows is not None and is_sharded(rows.weight) and rows.divided_by is None:
        raise TypeError(
            f"The weight of {rows.label!r} is a DTensor in forward: call parallelize_module before grass.compact(), "
            "and after fully_shard the module that it was given"
        )
    return rows


def _check_ends(ends: Tensor, tokens: int) -> None:
    """Raise ``ValueError`` unless the places are ascending and among the tokens."""
    limits = [0, *ends.tolist(), tokens]
    if any(start > end for start, end in pairwise(limits)):
        raise ValueError(f"ends must be ascending, from 0 to the {tokens} tokens that there are: got {limits[1:-1]}")
