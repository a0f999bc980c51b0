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

The parts of a layer: :mod:`~grass.compact_mode.active_rows` (where rows are in the weight),
:mod:`~grass.compact_mode.gradient_sketch` (what rules that read norms gather),
:mod:`~grass.compact_mode.weight_storage` (plain or 8 bits), :mod:`~grass.compact_mode.synced_rows` (weight and active
rows agree, and who hears of it) and :mod:`~grass.compact_mode.linear_function` (backward).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from grass.compact_mode.gradient_sketch import SketchedRows
from grass.compact_mode.linear_function import CompactLinearFunction
from grass.compact_mode.synced_rows import Stamps, counted, looks_always
from grass.compact_mode.weight_storage import WeightStorage
from grass.parallel.shards import TENSOR_PARALLEL, is_sharded, is_tensor_parallel, local
from grass.selection.projector import Projector
from grass.state.master import current
from grass.state.schema import State


class _Layers(weakref.WeakSet["CompactLayer"]):
    """Counts how often a layer was added, and tells of it.

    Attributes:
        on_add: called after each addition; :mod:`grass.compact_mode.registry` sets it.
    """

    additions = 0
    on_add: Callable[[], None] | None = None

    def add(self, item: CompactLayer) -> None:
        self.additions += 1
        super().add(item)
        if self.on_add is not None:
            self.on_add()


LAYERS: _Layers = _Layers()
"""Every converted layer alive."""


def autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast makes of a tensor: it leaves float64 alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


class CompactLayer(SketchedRows):
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
        storage: how the weight is kept.
        synced: makes weight and active rows agree.
        listeners: hear of uses and changes of the values.
    """

    bias: Any
    storage = WeightStorage()
    owner: Any = None  # grass.compact_mode.registry.Owner: the optimizer that trains the active rows
    drawn_by: tuple[int, Any] | None = None  # seed and Owner of the optimizer that drew the rows of the last steps
    norms: Tensor | None = None
    divided_by: str | None = None  # what divides the weight among ranks and was there before the conversion

    def forward(self, x: Tensor) -> Tensor:
        """``x (..., n) -> (..., m)``; without gradients this is the plain layer's own forward."""
        if isinstance(x, torch.fx.Proxy):  # type: ignore[unreachable]
            raise TypeError("torch.fx cannot trace converted layers: call grass.expand(model) first")
        if is_tensor_parallel(self) and self.divided_by is None:
            raise TypeError(TENSOR_PARALLEL)
        if torch.is_grad_enabled() and is_tracing():  # type: ignore[no-untyped-call]
            raise TypeError(
                "torch.jit.trace cannot trace the gradients of converted layers: trace under torch.no_grad(), or call "
                "grass.expand(model) first"
            )
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
            x, bias = autocast(x, dtype), None if bias is None else autocast(bias, dtype)
            weight = autocast(weight, dtype) if scale is None else weight
        rows = active, self.chosen, self.dim, self.rank, self.gradient_scale
        y, _ = CompactLinearFunction.apply(x, weight, scale, bias, *rows, self.fed_sketch(), self.signs)  # type: ignore[no-untyped-call]
        return y  # type: ignore[no-any-return]

    @torch.no_grad()
    def restore(self, indices: Tensor, explored: Tensor, values: Tensor | None = None) -> None:
        """Return to saved rows, with saved values, of all or of the selected ones, where the weight is less precise."""
        self.end_sketch()
        self.finish_writing()
        self.selected.copy_(indices)
        self.explored.copy_(explored)
        self.reload()
        if values is not None:
            rows, values = self.rows(), local(values)
            (rows if values.shape == rows.shape else self.selected_part(rows)).copy_(values)
            self.synced.stepped = True
        self.mark_synced()

    def current(self, indices: Tensor) -> Tensor:
        """Values of rows that a step has written, as the weight holds them or will hold them."""
        if self.synced.late:
            return self.rows().to(self.weight.dtype)
        return self.take(self.stored(), Projector(indices, None, self.dim))

    def saved_state(self, state: State) -> State:
        """The optimizer's state of a layer with strata, as that of the whole weight."""
        raise NotImplementedError

    def held_state(self, state: State) -> State:
        """This rank's part of what :meth:`saved_state` has returned."""
        raise NotImplementedError

    # how the weight is kept

    @property
    def weights(self) -> str | None:
        """``"int8"`` where it is stored as codes."""
        return self.storage.weights

    @property
    def weight_codes(self) -> Any:
        """The weight under the name that codes have in a ``state_dict``, which distributed checkpoint looks up."""
        return self.weight

    def weight_key(self, prefix: str) -> str:
        """The name of the weight in the plain model's ``state_dict``, given this layer's prefix."""
        return f"{prefix}weight"

    def plain_matrix(self) -> Tensor | None:
        """As :meth:`ActiveRows.plain_matrix`: codes are no values."""
        return None if self.weights else super().plain_matrix()

    def scale(self) -> Tensor | None:
        """:meth:`WeightStorage.scale`."""
        return self.storage.scale(self)

    def gather(self, projector: Projector, out: Tensor | None = None) -> Tensor:
        """The chosen rows of the weight: :meth:`WeightStorage.gather`."""
        return self.storage.gather(self, projector, out)

    def decay_(self, factor: float, key: int | None = None) -> None:
        """``W <- factor W``: :meth:`WeightStorage.decay_`."""
        self.storage.decay_(self, factor, key)

    @counted
    def write_back(self, key: int | None = None) -> None:
        """Copy the active rows into the weight: :meth:`WeightStorage.write_back`."""
        self.storage.write_back(self, key)

    @counted
    def reload(self) -> None:
        """Copy the weight's rows into the active rows."""
        self.gather(self.active_projector(), out=self.rows())

    def holds_active(self) -> bool:
        """Whether the weight's rows are what the active rows are written back as."""
        return self.storage.holds(self)

    @counted
    def reload_changed(self) -> None:
        """Copy the weight's rows into the active rows where these differ: :meth:`SyncedRows.take`."""
        self.synced.take(self)

    def unconvert(self) -> None:
        """Write the values, active rows included, into a plain weight."""
        self.sync()
        self.storage.unconvert(self)

    # weight and active rows agree

    def sync(self, *, compare: bool = False, probe: bool = False) -> None:
        """Make weight and active rows agree: :meth:`SyncedRows.sync`."""
        self.synced.sync(self, compare=compare, probe=probe)

    def follow(self, *, compare: bool = False, probe: bool = False) -> None:
        """Take up what was changed from outside: :meth:`SyncedRows.follow`."""
        self.synced.follow(self, compare=compare, probe=probe)

    def prepare_step(self) -> None:
        """Take up what was changed from outside, and forget a gradient of the weight."""
        self.synced.report_unseen(self)
        self.follow(probe=looks_always(self))
        self.synced.seen = False
        self.drop_gradient()

    def mark_synced(self) -> None:
        """Note that weight and active rows agree: :meth:`SyncedRows.mark`."""
        self.synced.mark(self)

    def finish_writing(self) -> None:
        """Wait for values that are on their way, and write active rows into the weight if that is done late."""
        self.arrive()
        if self.synced.late:
            self.sync()

    def own_weight(self) -> nn.Parameter:
        """The weight, past ``__getattr__``, which is slow.

        Raises:
            RuntimeError: a parametrization has taken it away since the conversion.
        """
        if (weight := self._parameters.get("weight")) is None:
            raise RuntimeError(
                f"The weight of the converted layer {self.label!r} is no longer its parameter: apply weight_norm, "
                "pruning and other parametrizations before grass.compact(), which then leaves the layer at full rank"
            )
        return weight

    def stamps(self) -> Stamps | None:
        """What any change of active rows or weight changes, as PyTorch sees it: of this rank's part if sharded.

        ``None`` for fake tensors, which own no memory here, and where a ``DTensor`` has taken the place of a plain
        tensor or a plain one that of a ``DTensor``, which is no change of values.
        """
        active, weight = self._parameters.get("active"), self.own_weight()
        if active is None:
            return None
        kind: type[Tensor] = nn.Parameter
        first, second = cast("tuple[Tensor, Tensor]", (active, weight))
        if self.synced.sharded:
            kind, first, second = Tensor, local(active), local(weight)  # detach() fails in inference mode
        if type(first) is not kind or type(second) is not kind or first.is_meta or second.is_meta:
            return None
        return (id(active), active._version, first.data_ptr()), (id(weight), weight._version, second.data_ptr())

    # listeners

    def arrive(self) -> None:
        """Tell listeners that values are about to be read or written."""
        for listener in self.listeners:
            listener.before_use()

    def before_change(self) -> None:
        """Tell listeners that a step has written the active rows."""
        for listener in self.listeners:
            listener.before_change(self)

    def after_change(self, *, everything: bool) -> None:
        """Tell listeners that the layer is ready for the next forward."""
        for listener in self.listeners:
            listener.after_change(self, everything=everything)

    def before_saving(self) -> None:
        """Make values ready to be saved or copied."""
        for listener in self.listeners:
            listener.before_saving()
        self.sync(probe=looks_always(self))

    def before_loading(self) -> None:
        """Make values ready to be replaced."""
        for listener in self.listeners:
            listener.before_loading()

    # as a module

    def __getstate__(self) -> dict[str, Any]:
        """The content of copies and pickles; in them weight and active rows agree."""
        self.before_saving()
        return {key: value for key, value in vars(self).items() if key != "listeners"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copied and unpickled layers register themselves, so that a copied optimizer finds them."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.freeze()
        LAYERS.add(self)

    def freeze(self) -> None:
        """Let the weight take no gradient, which it does while :mod:`grass.compact_mode.reads` watches it."""
        if (weight := self._parameters.get("weight")) is not None:
            weight.requires_grad_(False)

    def take_flag(self) -> None:
        """Unfreeze the active rows if the weight was unfrozen by its name, after the conversion."""
        if self.own_weight().requires_grad:
            self.active.requires_grad_(True)
        self.freeze()

    def drop_gradient(self) -> None:
        """Forget a gradient of the weight, which it has where code has unfrozen it: rows train, it does not."""
        if (weight := self._parameters.get("weight")) is not None and weight.grad is not None:
            weight.grad = None

    def train(self, mode: bool = True) -> CompactLayer:
        """Also looks for changes through ``.data``, which tensor versions do not show, and once more in a forward."""
        if mode != self.training:
            self.follow(compare=True)
            self.synced.look_once()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompactLayer:
        """Draws the first rows again when a layer leaves the meta device, where indices have no values."""
        self.finish_writing()
        was_meta, scale = self.chosen.is_meta, self.scale()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.storage.after_apply(self, scale)
        if was_meta and not self.chosen.is_meta:
            self.chosen.copy_(self.draw_first())
            self.synced.empty = True
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """That of the plain layer: the weight holds the active rows, which are left out."""
        self.before_saving()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}active"]
        if self.storage.key != "weight":
            destination[prefix + self.storage.key] = destination.pop(f"{prefix}weight")

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
        self.before_loading()
        state_dict, plain = self.storage.to_load(self, state_dict, prefix)
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if f"{prefix}active" in state_dict and f"{prefix}weight" not in state_dict:
            error_msgs.append(
                f"{prefix}active comes without {prefix}weight: which columns they are is not saved with them. Load "
                "what state_dict() returns, or by grass.load_columns a file of the columns that changed"
            )
        super()._load_from_state_dict(*arguments)
        if f"{prefix}active" in missing_keys:
            missing_keys.remove(f"{prefix}active")
        if f"{prefix}weight" in missing_keys:
            missing_keys[missing_keys.index(f"{prefix}weight")] = prefix + self.storage.key
        if self.rows().is_meta:
            raise RuntimeError(
                "A converted layer on the meta device has lost its active rows: load weights before grass.compact(), "
                "and with accelerate choose FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)"
            )
        self.reload_changed()
        if plain is not None:
            self.rows().copy_(current(self.active_projector().gather(plain), self.rows()))
        self.mark_synced()

    def extra_repr(self) -> str:
        """The plain layer's text, with rank and dim."""
        weights = f", weights={self.weights}" if self.weights else ""
        return f"{super().extra_repr()}, {self.rows_repr()}{weights}"


class CompactLinear(CompactLayer, nn.Linear):
    """A converted ``nn.Linear``."""

    plain_class: type[nn.Module] = nn.Linear


Layers = dict[int, CompactLayer]
"""Converted layers by the ``id`` of their active rows."""
