r"""How selection behaves while training: turnover, energy captured and coverage, for any loop.

For a weight with ``m`` selectable rows (``dim=1``: columns), ``sigma`` the rows selected now, ``sigma'`` those selected
before the latest refresh, and ``G_i`` the rows of its gradient:

========  ==========================================================  ==============================================
turnover  ``|sigma \ sigma'| / |sigma|``                              0 before the second selection
energy    ``sum_{i in sigma} ||G_i||^2 / sum_i ||G_i||^2``            its maximum is what ``top_r`` takes
coverage  ``|union of all selections so far| / m``                    since the first :class:`SelectionHistory`
========  ==========================================================  ==============================================

A row drawn twice counts once. Which gradient ``energy`` speaks of depends on the mode. Dense mode has all of it: it is
that of the step just made, so that between two refreshes one sees how a selection ages. Compact mode forms the chosen
rows alone, and all norms are known only at a refresh: there it is the sketched gradient from which the rows were
chosen, the same on all ranks, and it stays until the next refresh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.registry import by_active_rows, layers_of
from grass.options import as_matrix, is_projected
from grass.state.moments import moment_dtype

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("turnover", "energy", "coverage")


def turnover(before: Tensor, after: Tensor) -> float:
    """Share of the rows selected ``after`` that were not ``before``; both are boolean masks ``(m,)``."""
    return float((after & ~before).sum() / after.sum())


def energy(norms: Tensor, selected: Tensor) -> float:
    """Share of the squared gradient norm in the selected rows; NaN for a gradient of zeros or one that is not finite.

    Args:
        norms: ``(m,)``, the norms of the gradient's rows.
        selected: boolean mask ``(m,)``.
    """
    squares = norms.detach().to("cpu", torch.float64).square()
    return float(squares[selected].sum() / squares.sum())


class LayerRecord(NamedTuple):
    """One weight at one record; ``step`` counts the optimizer's steps since the history was made."""

    step: int
    layer: str
    turnover: float
    energy: float
    coverage: float


@dataclass
class _Tracked:
    """What is known of the selections of one weight."""

    name: str
    selected: Tensor
    ever: Tensor
    refreshes: int
    turnover: float = 0.0
    energy: float = math.nan
    made: int = 0
    selections: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)

    def reselect(self, selected: Tensor) -> None:
        """Go on to the next selection, a boolean mask."""
        self.turnover, self.selected = turnover(self.selected, selected), selected
        self.ever |= selected

    def measure(self, norms: Tensor) -> None:
        """Take the energy captured from these norms, unless they tell nothing."""
        share = energy(norms, self.selected)
        if math.isfinite(share):
            self.energy = share


class _Selected(NamedTuple):
    """A parameter whose rows are selected, as it is now."""

    position: int
    name: str
    parameter: Tensor
    layer: CompactLayer | None
    state: dict[str, Any]

    def mask(self) -> Tensor:
        """The selected rows as a boolean mask ``(m,)`` on the CPU."""
        if self.layer is not None:
            indices, size = self.layer.selected, self.layer.matrix().shape[self.layer.dim]
        else:
            indices, size = self.state["indices"], as_matrix(self.parameter).shape[self.state["dim"]]
        mask = torch.zeros(size, dtype=torch.bool)
        mask[indices.cpu()] = True
        return mask


class SelectionHistory:
    """Follows every selection that an optimizer makes; :meth:`record` sums it up.

    ::

        history = grass.diagnostics.SelectionHistory(optimizer)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            print(history.record())  # {"turnover": 0.31, "energy": 0.87, "coverage": 0.64}
            optimizer.zero_grad()

    Hooks on ``optimizer.step()`` see each refresh, so :meth:`record` may be called as rarely as one likes. It costs the
    row norms of every gradient in dense mode and nearly nothing in compact mode. Layers are called what
    ``named_parameters()`` calls them where the optimizer was given names, as ``GrassAdamW(model)`` is.

    Args:
        optimizer: a :class:`grass.GrassAdamW` in either mode, or any optimizer to which :func:`grass.attach` attached
            converted layers, after that. A wrapper's inner optimizer, not the wrapper.
        keep: keep every record and every selection for :meth:`table` and :meth:`mask`. Their memory grows with the
            run; a long one that only logs goes without.

    Raises:
        TypeError: it is no ``torch.optim.Optimizer``.
        ValueError: it selects no rows.
    """

    def __init__(self, optimizer: Optimizer, *, keep: bool = True) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"SelectionHistory takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self._layers = layers_of(p for group in optimizer.param_groups for p in group["params"])
        layers = by_active_rows(self._layers)
        groups = [group for group in optimizer.param_groups for p in group["params"] if _selects(p, group, layers)]
        if not groups:
            raise ValueError(
                f"{type(optimizer).__name__} selects no rows: give grass.GrassAdamW a rank, or convert the model with "
                "grass.compact() first"
            )
        self.optimizer, self.keep, self.step = optimizer, keep, 0
        self.records: list[LayerRecord] = []
        self._tracked: dict[int, _Tracked] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def record(self) -> dict[str, float]:
        """Turnover, energy and coverage at this moment, means over the layers. Call it between step and zero_grad.

        Without gradients dense mode repeats the energy of the last record that had them; energy is NaN before anything
        was measured, in compact mode until the first refresh.

        Raises:
            RuntimeError: the optimizer has not stepped yet.
        """
        for item in self._selected():
            if item.layer is None and item.parameter.grad is not None and item.position in self._tracked:
                self._tracked[item.position].measure(_dense_norms(item))
        rows = [
            LayerRecord(self.step, t.name, t.turnover, t.energy, float(t.ever.float().mean()))
            for t in self._tracked.values()
        ]
        if not rows:
            raise RuntimeError("Nothing to record before the first optimizer.step()")
        if self.keep:
            self.records += rows
        return {measure: _mean([getattr(row, measure) for row in rows]) for measure in MEASURES}

    def table(self) -> pd.DataFrame:
        """All records as a ``pandas.DataFrame`` with the columns of :class:`LayerRecord`."""
        import pandas as pd

        return pd.DataFrame(self.records, columns=list(LayerRecord._fields))

    def layers(self) -> list[str]:
        """Names of the layers seen so far, in the optimizer's order."""
        return [self._tracked[position].name for position in sorted(self._tracked)]

    def mask(self, layer: str) -> NDArray[np.bool_]:
        """Which rows of a layer each step trained: boolean ``(steps, m)``, for an image.

        Raises:
            ValueError: no layer has this name, or the history does not keep selections.
        """
        tracked = next((t for t in self._tracked.values() if t.name == layer), None)
        if tracked is None or not self.keep:
            raise ValueError(f"No selections of {layer!r} (keep={self.keep}); layers: {', '.join(self.layers())}")
        mask = np.zeros((self.step, len(tracked.ever)), dtype=bool)
        for start, indices in tracked.selections:
            mask[start:] = False
            mask[start:, indices] = True
        return mask

    def state_dict(self) -> dict[str, Any]:
        """What a history needs to go on in a resumed run, as JSON takes it; records and masks stay behind."""
        layers = {
            str(position): {
                "name": t.name,
                "refreshes": t.refreshes,
                "turnover": t.turnover,
                "energy": t.energy,
                "rows": len(t.ever),
                "selected": _to_hex(t.selected),
                "ever": _to_hex(t.ever),
            }
            for position, t in self._tracked.items()
        }
        return {"step": self.step, "layers": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`, before the first step; the optimizer is loaded on its own."""
        self.step = state["step"]
        for position, saved in state["layers"].items():
            selected, ever = (_from_hex(saved[key], saved["rows"]) for key in ("selected", "ever"))
            tracked = _Tracked(saved["name"], selected, ever, saved["refreshes"], saved["turnover"], saved["energy"])
            tracked.selections = [(self.step, selected.nonzero()[:, 0].to(torch.int32).numpy())]
            self._tracked[int(position)] = tracked

    def close(self) -> None:
        """Stop following; what was recorded stays."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """See active rows before their first refresh."""
        for item in self._selected():
            if item.layer is not None:
                self._follow(item, self.step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for item in self._selected():
            self._follow(item, self.step + (item.layer is not None))
        self.step += 1

    def _follow(self, item: _Selected, start: int) -> None:
        """Note a selection if it is new, as that of the steps from ``start`` on."""
        tracked, refreshes = self._tracked.get(item.position), item.state.get("refreshes", 1)
        norms, made = (None, 0) if item.layer is None else (item.layer.norms, item.layer.selections)
        if tracked is not None and tracked.refreshes == refreshes and tracked.made == made:
            return
        selected = item.mask()
        if tracked is None:
            tracked = self._tracked[item.position] = _Tracked(item.name, selected, selected.clone(), refreshes)
        else:
            tracked.reselect(selected)
            tracked.refreshes = refreshes
        tracked.made = made
        if norms is not None:
            tracked.measure(norms)
        if self.keep:
            tracked.selections.append((start, selected.nonzero()[:, 0].to(torch.int32).numpy()))

    def _selected(self) -> Iterator[_Selected]:
        """The parameters with a selection, as of now: wrappers may swap parameters between two steps."""
        layers, position = by_active_rows(self._layers), 0
        for group in self.optimizer.param_groups:
            names = group.get("param_names", [None] * len(group["params"]))
            for p, name in zip(group["params"], names, strict=True):
                layer, state = layers.get(id(p)), self.optimizer.state.get(p, {})
                if layer is not None or "indices" in state:
                    shown = name.rpartition(".")[0] or name if name else f"parameter {position}"
                    yield _Selected(position, shown, p, layer, state)
                position += 1


def _selects(p: Tensor, group: dict[str, Any], layers: dict[int, CompactLayer]) -> bool:
    return id(p) in layers or ("rank" in group and is_projected(p, group))


def _to_hex(mask: Tensor) -> str:
    return np.packbits(mask.numpy()).tobytes().hex()


def _from_hex(text: str, rows: int) -> Tensor:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8), count=rows)
    return torch.from_numpy(bits.astype(np.bool_))


def _dense_norms(item: _Selected) -> Tensor:
    assert item.parameter.grad is not None
    grad = as_matrix(item.parameter.grad.detach())
    norms: Tensor = torch.linalg.vector_norm(grad, dim=1 - item.state["dim"], dtype=moment_dtype(grad))
    return norms


def _mean(values: list[float]) -> float:
    """The mean of the values that there are; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
