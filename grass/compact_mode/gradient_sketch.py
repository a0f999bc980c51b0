"""The sketch of a gradient that a converted layer gathers for rules that choose rows by norm.

It is ``g^T (x S)`` for ``dim=0`` with ``S (n, s)``, and ``x^T (g S)`` for ``dim=1`` with ``S (m, s)``. It arrives as
the gradient of a leaf tensor beside the parameters. So it adds up over micro-batches as gradients do, also under
checkpointing and ``torch.compile``.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from grass.compact_mode.active_rows import ActiveRows
from grass.compact_mode.synced_rows import Listener, SyncedRows


class SketchedRows(ActiveRows):
    """The part of :class:`grass.compact_mode.layer.CompactLayer` that gathers a sketch of its gradient.

    Attributes:
        sketch: the leaf whose gradient is the sketch, ``(n, s)`` for ``dim=1`` or ``(m, s)``; ``None`` while none is
            gathered.
        signs: ``S``; ``None`` gathers the gradient itself.
        held_sketch: a sketch that has ended, for a step that is on its way.
        sums_sketch: whether :meth:`end_sketch` returns what all ranks have gathered.
    """

    synced: SyncedRows
    listeners: tuple[Listener, ...] = ()
    sketch: Tensor | None
    signs: Tensor | None
    held_sketch: Tensor | None = None
    sums_sketch = False

    def begin_sketch(self, signs: Tensor | None) -> None:
        """Gather ``G S`` from the next forward on; ``signs`` is ``S``. ``None`` gathers the gradient itself."""
        width = self.shape[1 - self.dim] if signs is None else signs.shape[1]
        self.signs = signs
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.weight.device, "requires_grad": True}
        self.sketch = torch.zeros(self.shape[self.dim], width, **options)
        renew = functools.partial(_renew, weakref.ref(self))
        renew.__torch_unserializable__ = True  # type: ignore[attr-defined]  # copies have no hook, and no warning
        self.sketch.register_hook(renew)  # type: ignore[no-untyped-call]

    def fed_sketch(self) -> Tensor | None:
        """The sketch that the backward of this forward adds to: none if the rows are frozen.

        What was gathered with gradients that the loop has dropped, as by ``model.zero_grad()``, is dropped too; of
        compiled code before it adds to the sketch. Gradients of sharded rows are elsewhere until the step.
        """
        if self.sketch is None or not self.active.requires_grad:
            return None
        if not torch.compiler.is_compiling():
            self.renew_sketch()
        return self.sketch

    def renew_sketch(self) -> None:
        """Drop what has been gathered with gradients that are there no more."""
        active = self.active
        if active.is_leaf and active.grad is None and not self.synced.sharded:
            self.clear_sketch()

    def clear_sketch(self) -> None:
        """Drop what has been gathered, as ``zero_grad`` drops gradients."""
        if self.sketch is not None:
            self.sketch.grad = None

    def hold_sketch(self) -> None:
        """Stop gathering now; what has been gathered waits for :meth:`end_sketch`, whatever becomes of gradients."""
        if self.sketch is not None:
            self.held_sketch = self.end_sketch()

    def end_sketch(self) -> Tensor:
        """Stop gathering; returns the sketched rows, zero where no backward has run."""
        if self.held_sketch is not None:
            held, self.held_sketch = self.held_sketch, None
            return held
        sketch, self.sketch, self.signs = self.sketch, None, None
        if sketch is None:
            return torch.zeros(self.shape[self.dim], 1, dtype=torch.float32, device=self.weight.device)
        return torch.zeros_like(sketch) if sketch.grad is None else sketch.grad


@torch.compiler.disable(reason="a hook of the backward of compiled code")  # type: ignore[no-untyped-call, untyped-decorator]
def _renew(reference: weakref.ref[SketchedRows], grad: Tensor) -> None:
    """Before a sketch is added to: compiled code adds to it first, to the active rows later.

    Where the weight comes and goes, gradients do, too.
    """
    layer = reference()
    if layer is not None and not any(listener.moves_weight for listener in layer.listeners):
        layer.renew_sketch()
