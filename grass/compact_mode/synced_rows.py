"""The agreement of weight and active rows, which hold the same values twice.

Forward computes with the weight, the optimizer steps ``active``. A step writes the active rows back. Code outside of
Grass may change either of them: model averaging, clipping of weights, ``p.data -= ...``. PyTorch counts most changes in
the tensor's version, so comparing versions is enough. A change through ``.data`` has no version. Steps and forwards
with gradients look for it by value in a selected and in an explored row. On other devices than the CPU only the first
forwards look, and one after each selection, because the device is waited for. Switches between ``train()`` and
``eval()`` compare all active rows, and the next forward looks once more. Where both were changed, the weight wins.

What is built on compact mode hears of uses and changes of a layer's values as a :class:`Listener`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from grass.parallel.shards import is_sharded

if TYPE_CHECKING:
    from grass.compact_mode.layer import CompactLayer

_P = ParamSpec("_P")
logger = logging.getLogger("grass")

PROBES = 8
"""How many of the first forwards look for changes through ``.data`` where looking takes time."""

ALWAYS = -1
"""Number of probes of a layer that was found changed through ``.data``: every forward looks."""

Stamp = tuple[int, int, int]
"""A tensor's identity, version and address: they differ after any change that PyTorch can see."""

Stamps = tuple[Stamp, Stamp]
"""Those of the active rows and of the weight."""


def counted(write: Callable[_P, None]) -> Callable[_P, None]:
    """A write that the tensor's version counts, also in inference mode, and that autograd does not record."""
    counting: Callable[_P, None] = torch.inference_mode(False)(torch.no_grad()(write))
    return counting


class Listener:
    """Hears of uses and changes of a layer's values; ``layer.listeners`` has those of a layer, its copies have none.

    Attributes:
        moves_weight: whether the weight is not always the layer's, so that nobody may ask for its gradient.
    """

    moves_weight = False

    def before_use(self) -> None:
        """The layer is about to read or write its values."""

    def before_saving(self) -> None:
        """They are about to be saved or copied."""

    def before_loading(self) -> None:
        """They are about to be replaced by loaded ones."""

    def before_change(self, layer: CompactLayer) -> None:
        """A step has written the active rows, and other rows may become active now."""

    def after_change(self, layer: CompactLayer, *, everything: bool) -> None:
        """The change has ended; ``everything``: it has changed all rows of the weight."""


class LastChange(Listener):
    """Knows which rows of the weight the last step has written, for copies of the weight.

    Attributes:
        number: how many steps have written rows.
        rows: which rows the last one wrote; ``None``: perhaps all.
        before: the weight's stamp before it; ``None`` where it is not known.
        after: the weight's stamp after it.
    """

    def __init__(self, *, moves_weight: bool = False) -> None:
        self.moves_weight = moves_weight
        self.number = 0
        self.rows: Tensor | None = None
        self.before: Stamp | None = None
        self.after: Stamp | None = None
        self._begun: tuple[Tensor, Stamp | None] | None = None

    @classmethod
    def of(cls, layer: CompactLayer) -> LastChange | None:
        """The one that listens to a layer."""
        return next((listener for listener in layer.listeners if isinstance(listener, cls)), None)

    def before_change(self, layer: CompactLayer) -> None:
        """Note the rows that were written."""
        self._begun = layer.chosen.clone(), layer.synced.weight_stamp()

    def after_change(self, layer: CompactLayer, *, everything: bool) -> None:
        """Count the change. Where the weight is written late, it was written now if other rows were selected."""
        assert self._begun is not None
        (rows, before), after = self._begun, layer.synced.weight_stamp()
        everything = everything or (layer.synced.late and after != before)
        self.number, self.rows = self.number + 1, None if everything else rows
        self.before, self.after, self._begun = before, after, None

    def spans(self, then: tuple[int, int], now: tuple[int, int]) -> bool:
        """Whether the last change led from one version and address of the weight to another."""
        if self.before is None or self.after is None:
            return False
        return (self.before[1:], self.after[1:]) == (then, now)


class SyncedRows:
    """The part of :class:`grass.compact_mode.layer.CompactLayer` that makes weight and active rows agree.

    Attributes:
        late: steps leave the weight as it is; it is written when something calls :meth:`sync`.
        agreed: the stamps when weight and active rows were known to agree.
        sharded: whether the weight was a ``DTensor`` when both agreed; of its changes only tensor versions tell.
        empty: the active rows have no values yet: the layer has left the meta device.
        stepped: whether an optimizer has stepped them, here or before they were saved.
        seen: whether something has looked for changes since the last step; compiled forwards do not.
    """

    def __init__(self) -> None:
        self.late = self.sharded = self.empty = self.stepped = self.seen = False
        self.agreed: Stamps | None = None
        self._selections = 0  # of the layer when both agreed
        self._looks_next = False  # whether rows were selected then, and the next step is the first to move them
        self._once = False  # whether the next forward looks for changes through .data, also without gradients
        self._pending = False  # whether what was agreed is still to be written into the weight
        self._probes = PROBES
        self._told: set[str] = set()
        self._probed: list[Tensor] | None = None  # the probed rows when both agreed, as long as forwards look
        self._line: Tensor | None = None  # a line of the weight then
        self._finer: Tensor | None = None  # the active rows of the last step, if others were taken over since

    def __getstate__(self) -> dict[str, Any]:
        """The content of a copy. Steps write its weight at once."""
        return {**vars(self), "late": False, "_finer": None}

    def weight_stamp(self) -> Stamp | None:
        """The weight's stamp when both were known to agree."""
        return None if self.agreed is None else self.agreed[1]

    @torch.no_grad()
    def sync(self, layer: CompactLayer, *, compare: bool = False, probe: bool = False) -> None:
        """Make weight and active rows agree after one of them was changed from outside.

        A changed ``active`` is copied into the weight. A changed weight is copied into ``active``; it also wins where
        both were changed, as by averaging all parameters of a model. Compiled code skips this check, and so does
        a forward for which FSDP2 has gathered whole tensors: changes of sharded ones are found by the next step.

        Args:
            layer: whose weight and active rows.
            compare: compare values even if tensor versions show no change.
            probe: compare two active rows, where looking takes time only in the first few calls.
        """
        layer.arrive()
        if torch.compiler.is_compiling() or is_tracing():  # type: ignore[no-untyped-call]
            return
        self.seen = True
        if self.sharded and not self.empty and not is_sharded(layer.weight):
            return
        if self._pending:
            self._write_pending(layer)
        now = layer.stamps()
        if now is None:
            _check_not_replaced(layer)
        if self.empty and now is None and is_sharded(layer.weight):
            layer.reload()
        if now is None or (
            now == self.agreed and (self.sharded or not (compare or self._changed_unseen(layer, probe)))
        ):
            return
        if not layer.holds_active():
            if self._weight_changed(layer, now):
                layer.storage.take_weight(layer)
            else:
                layer.write_back()
                self._finer = None
        self.agreed = layer.stamps()
        self._remember(layer)

    def follow(self, layer: CompactLayer, *, compare: bool = False, probe: bool = False) -> None:
        """As :meth:`sync`, but if the weight is written late, only take up a weight that was changed."""
        if not self.late:
            self.sync(layer, compare=compare, probe=probe)
            return
        layer.arrive()
        self.seen = True
        if (now := layer.stamps()) is not None and self.agreed is not None and now != self.agreed:
            layer.before_change()
            if now[1] != self.agreed[1]:
                layer.storage.take_weight(layer)
            layer.mark_synced()
            layer.after_change(everything=False)

    def report_unseen(self, layer: CompactLayer) -> None:
        """Before a step: warn of a change of active rows that compiled forwards since the last one have not seen."""
        if not self.seen and layer.active.grad is not None and self._only_active_changed(layer):
            self._tell(
                "Grass: the active columns of %r were changed between two steps. Compiled forwards do not look: a "
                "change before one, as by SAM, was without effect on it. Call the module that is not compiled there",
                layer.label,
            )

    def _only_active_changed(self, layer: CompactLayer) -> bool:
        """Whether versions show a change of the active rows since both agreed, and none of the weight."""
        now, then = layer.stamps(), self.agreed
        return now is not None and then is not None and now[0] != then[0] and now[1] == then[1]

    def mark(self, layer: CompactLayer) -> None:
        """Note that weight and active rows agree, or will when they are written back."""
        if self._looks_next:
            self.look_once()
        self._looks_next, self._selections = layer.selections != self._selections, layer.selections
        self.sharded = is_sharded(layer.weight)
        self.agreed, self._pending = layer.stamps(), self.late
        self.empty = self.empty and layer.rows().is_meta
        self._remember(layer)

    def take(self, layer: CompactLayer) -> None:
        """Give the active rows the weight's values, in their own precision where they still are written back as these.

        Weights that are put in for an evaluation and taken out again, as by ``load_state_dict``, must not round active
        rows that are more precise. So those of the last step are kept until the next, and return with their weight.
        """
        if self.empty:
            layer.reload()
        elif not layer.holds_active():
            active = layer.rows()
            if self._finer is None and self.stepped and layer.storage.rounds(layer):
                self._finer = active.clone()
            active.copy_(layer.storage.refined(layer, active, *([] if self._finer is None else [self._finer])))

    def note_step(self) -> None:
        """The active rows have been stepped."""
        self.stepped, self._finer = True, None

    def look_once(self) -> None:
        """Let the next forward look for changes through ``.data``, as when averages are put in to evaluate them."""
        self._once = True

    def _weight_changed(self, layer: CompactLayer, now: Stamps) -> bool:
        """Whether it was the weight that changed since both agreed, or the active rows have never had its values."""
        if self.agreed is None or self.empty or self.agreed[1] != now[1]:
            return True
        if now != self.agreed:
            return False
        self._probes = ALWAYS
        if (
            (then := self._probed) is not None
            and self._line is not None
            and (
                all(map(same_values, then, layer.probed_rows()))
                or layer.storage.has_left(layer, then)
                or not same_values(self._line, layer.line())
            )
        ):
            self._tell("Grass: the weight of %r was changed through .data; its active rows follow", layer.label)
            return True
        self._tell(
            "Grass: %r was changed through .data; its active rows are copied to the weight. If an average of "
            "parameters was put in, it is wrong: average by grass.AveragedModel",
            layer.label,
        )
        return False

    def _tell(self, what: str, label: str) -> None:
        """Warn once of each kind of change: loops may make it in every step."""
        if what not in self._told:
            self._told.add(what)
            logger.warning(what, label)

    def _remember(self, layer: CompactLayer) -> None:
        """Keep the probed rows while forwards look for changes through ``.data``."""
        looks = (self._probes or self._once or looks_always(layer)) and self.agreed is not None and not self.sharded
        self._probed = [row.clone() for row in layer.probed_rows()] if looks else None
        self._line = layer.line().clone() if looks else None

    def _write_pending(self, layer: CompactLayer) -> None:
        """Write the active rows into the weight, unless it was changed since they were stepped.

        While the layer computes elsewhere, its weight is not here and has no stamp: it is written later.
        """
        now = layer.stamps()
        if now is None:
            return
        if self.agreed is not None and now[1] == self.agreed[1]:
            layer.write_back()
            self.agreed = layer.stamps()
            self._remember(layer)
        self._pending = False

    def _changed_unseen(self, layer: CompactLayer, probe: bool) -> bool:
        """Whether the values differ though versions show no change, as after ``p.data -= p.grad``."""
        once, self._once = self._once, False
        if not once:
            if not probe or (self._probes == 0 and not looks_always(layer)):
                return False
            if self._probes > 0:
                self._probes -= 1
        return not layer.storage.holds(layer, probe=True)


def _check_not_replaced(layer: CompactLayer) -> None:
    """Refuse a plain tensor in the place of the active rows alone: forward computes with the weight and ignores it.

    Raises:
        TypeError: as ``torch.func.functional_call`` puts it there.
    """
    active: Any = layer._parameters.get("active")
    if type(active) is Tensor and type(layer.own_weight()) is nn.Parameter:
        raise TypeError(
            f"A tensor was put in the place of {layer.label + '.active'!r}, as by functional_call. Forward does not "
            "read it: it computes with the weight. Call grass.expand(model) before"
        )


def looks_always(layer: CompactLayer) -> bool:
    """Whether it costs next to nothing to compare a row: it lies in host memory, and is not stored as codes."""
    return layer.weights is None and layer.chosen.device.type == "cpu"


def copy_parameters_last(module: nn.Module) -> None:
    """Let copies and pickles of a module read its parameters after its hooks and the modules in it, which may wait."""
    vars(module)["_parameters"] = vars(module).pop("_parameters")


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal; those that are not a number equal each other."""
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
