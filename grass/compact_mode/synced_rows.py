"""The agreement of weight and active rows, which hold the same values twice.

Forward computes with the weight, the optimizer steps ``active``. A step writes the active rows back. Code outside of
Grass may change either of them: model averaging, clipping of weights, ``p.data -= ...``. PyTorch counts most changes in
the tensor's version, so comparing versions is enough. A change through ``.data`` has no version: the first forwards
look for it by value, and so do switches between ``train()`` and ``eval()``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, Protocol

import torch
from torch import Tensor, nn

from grass.compact_mode.active_rows import ActiveRows
from grass.parallel.shards import is_sharded
from grass.selection.projector import Projector

_P = ParamSpec("_P")
logger = logging.getLogger("grass")

PROBES = 8
"""How many of the first forwards look for changes through ``.data``."""

ALWAYS = -1
"""Number of probes of a layer that was found changed through ``.data``: every forward looks."""

Stamp = tuple[int, int, int]
"""A tensor's identity, version and address: they differ after any change that PyTorch can see."""


def counted(write: Callable[_P, None]) -> Callable[_P, None]:
    """A write that the tensor's version counts, also in inference mode, and that autograd does not record."""
    counting: Callable[_P, None] = torch.inference_mode(False)(torch.no_grad()(write))
    return counting


class Written(NamedTuple):
    """The last step that wrote active rows into the weight.

    Attributes:
        number: how many there were.
        rows: which rows it wrote; ``None``: perhaps all.
        before: the weight's stamp before.
        after: the weight's stamp after.
    """

    number: int = 0
    rows: Tensor | None = None
    before: Stamp | None = None
    after: Stamp | None = None

    def span(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Version and address of the weight before and after; ``None`` where they are not known."""
        if self.before is None or self.after is None:
            return None
        return self.before[1:], self.after[1:]


class Arrival(Protocol):
    """Waits for values that are on their way from the host."""

    def __call__(self) -> None:
        """Wait before they are read."""

    def settle(self, *, loads: bool = False) -> None:
        """Wait before they are saved or loaded."""


class SyncedRows(ActiveRows):
    """The part of :class:`grass.compact_mode.layer.CompactLayer` that makes weight and active rows agree."""

    written: Written | None = None  # kept for copies of the weight (grass.streaming); None: nobody asks
    deferred = False  # steps leave the weight as it is; what reads it on the host calls sync()

    _synced: tuple[Stamp, Stamp] | None = None  # active's and weight's, when they were known to agree
    _pending = False  # whether that is still to be written into the weight
    arriving: Arrival | None = None
    gated = False  # the module around it waits for the values that `arriving` brings
    _sharded = False
    _probes = PROBES
    _empty = False  # the active rows have no values yet: the layer has left the meta device
    _first: Tensor | None = None  # the values of the first active row when both agreed, as long as probes look at it

    def __getstate__(self) -> dict[str, Any]:
        """The content of copies and pickles; in them weight and active rows agree."""
        self.settle()
        self.sync()
        return {key: value for key, value in vars(self).items() if key not in ("gated", "deferred")}

    def train(self, mode: bool = True) -> SyncedRows:
        """Also looks for changes through ``.data``, which tensor versions do not show."""
        if mode != self.training:
            self.follow(compare=True)
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
        compiling = torch.compiler.is_compiling()
        if not (compiling and self.gated):
            self.arrive()
        if compiling or (self._sharded and not self._empty):
            return
        if self._pending:
            self._write_pending()
        now = self._stamps()
        if self._empty and now is None and is_sharded(self.weight):
            self.reload()
        if now is None or (now == self._synced and not compare and not (probe and self._changed_unseen())):
            return
        if not self.holds_active():
            if self._weight_changed(now):
                self.take_weight()
            else:
                self.write_back()
        self._synced = self._stamps()
        self._remember()

    def _weight_changed(self, now: tuple[Stamp, Stamp]) -> bool:
        """Whether it was the weight that changed since both agreed, or the active rows have never had its values."""
        if self._synced is None or self._empty or self._synced[1] != now[1]:
            return True
        if now != self._synced:
            return False
        self._probes = ALWAYS
        if self._first is not None and _same(self._first, self._row_of_active()):
            logger.warning("Grass: the weight of %r was changed through .data; its active rows follow", self.label)
            return True
        logger.warning(
            "Grass: %r was changed through .data; its active rows are copied to the weight. If an average of "
            "parameters was put in, it is wrong: average by grass.AveragedModel",
            self.label,
        )
        return False

    def _remember(self) -> None:
        """Keep the first active row while forwards look for changes through ``.data``."""
        self._first = self._row_of_active().clone() if self._probes and self._synced is not None else None

    def _row_of_active(self) -> Tensor:
        """The values of the first active row."""
        return self.rows().narrow(self.dim, 0, 1)

    def follow(self, *, compare: bool = False, probe: bool = False) -> None:
        """As :meth:`sync`, but if writing the weight is deferred, only take up a weight that was changed."""
        if not self.deferred:
            self.sync(compare=compare, probe=probe)
            return
        self.arrive()
        if (now := self._stamps()) is not None and self._synced is not None and now != self._synced:
            write = self.begin_write()
            if now[1] != self._synced[1]:
                self.take_weight()
            self.mark_synced()
            self.end_write(write, decays_all=False)

    def finish_writing(self) -> None:
        """Wait for values that are on their way, and write active rows into the weight if that was deferred."""
        self.arrive()
        if self.deferred:
            self.sync()

    def arrive(self) -> None:
        """Wait for values that are on their way from the host (:mod:`grass.offload`)."""
        if self.arriving is not None:
            self.arriving()

    def settle(self, *, loads: bool = False) -> None:
        """As :meth:`arrive`, before the layer is saved or loaded."""
        if self.arriving is not None:
            self.arriving.settle(loads=loads)

    def mark_synced(self) -> None:
        """Note that weight and active rows agree, or will when they are written back."""
        self.__dict__.update(_sharded=is_sharded(self.weight), _synced=self._stamps(), _pending=self.deferred)
        self._empty = self._empty and self.rows().is_meta
        self._remember()

    def begin_write(self) -> Written | None:
        """What :meth:`end_write` will note of a step that has written the active rows."""
        if self.written is None:
            return None
        before = None if self._synced is None else self._synced[1]
        return Written(self.written.number + 1, self.chosen.clone(), before)

    def end_write(self, begun: Written | None, *, decays_all: bool) -> None:
        """Note that the step has ended, and whether it changed the other rows too."""
        if begun is not None:
            after = None if self._synced is None else self._synced[1]
            everything = decays_all or (self.deferred and after != begun.before)  # new rows were selected
            self.written = begun._replace(rows=None if everything else begun.rows, after=after)

    def holds_active(self) -> bool:
        """Whether the weight's rows are what the active rows are written back as."""
        rows = self.gather(self.active_projector())
        return _same(self.rows().to(rows.dtype), rows)

    @counted
    def write_back(self, key: int | None = None) -> None:
        """Copy the active rows into the weight. ``key``: for the stochastic rounding of 8-bit weights."""
        self.put(self.stored(), self.active_projector(), self.rows())

    def current(self, indices: Tensor) -> Tensor:
        """Values of rows that a step has written, as the weight holds them or will hold them."""
        if self.deferred:
            return self.rows().to(self.weight.dtype)
        return self.take(self.stored(), Projector(indices, None, self.dim))

    def take_weight(self) -> None:
        """Take over a weight that was changed from outside."""
        self.reload()

    @counted
    def reload(self) -> None:
        """Copy the weight's rows into the active rows."""
        self.gather(self.active_projector(), out=self.rows())

    def _write_pending(self) -> None:
        """Write the active rows into the weight, unless it was changed since they were stepped.

        While the layer computes elsewhere, its weight is not here and has no stamp: it is written later.
        """
        now = self._stamps()
        if now is None:
            return
        if self._synced is not None and now[1] == self._synced[1]:
            self.write_back()
            self._synced = self._stamps()
        self._pending = False

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
        return not _same(self._row_of_active().to(row.dtype), row)

    def _stamps(self) -> tuple[Stamp, Stamp] | None:
        """Stamps of ``active`` and weight; ``None`` for sharded and fake tensors, which own no memory here."""
        active, weight = self._parameters.get("active"), self._parameters.get("weight")
        if weight is None:
            raise RuntimeError(
                f"The weight of the converted layer {self.label!r} is no longer its parameter: apply weight_norm and "
                "other parametrizations before grass.compact(), which then leaves the layer at full rank"
            )
        if type(active) is not nn.Parameter or type(weight) is not nn.Parameter or active.is_meta:
            return None
        return (id(active), active._version, active.data_ptr()), (id(weight), weight._version, weight.data_ptr())


def copy_parameters_last(module: nn.Module) -> None:
    """Let copies and pickles of a module read its parameters after its hooks and the modules in it, which may wait."""
    vars(module)["_parameters"] = vars(module).pop("_parameters")


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal; those that are not a number equal each other."""
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
