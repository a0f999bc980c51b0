"""Follows the selections of an optimizer; :mod:`grass.diagnostics` says what it measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.registry import by_active_rows, layers_of
from grass.diagnostics.measures import MEASURES, LayerRecord, Tracked, mean
from grass.extras import optional
from grass.options import as_matrix, is_batch, is_projected, parameter_names
from grass.parallel.shards import row_norms
from grass.state.strata import Strata

if TYPE_CHECKING:
    import pandas as pd


class _Selected(NamedTuple):
    """The current state of a parameter whose rows are selected."""

    position: int
    name: str
    parameter: Tensor
    layer: CompactLayer | None
    state: dict[str, Any]

    def own(self, tensor: Tensor) -> Tensor:
        """The matrix that rows are selected of in a tensor shaped like the parameter: this rank's stratum of it."""
        strata = Strata.of(self.parameter, self.state["dim"])
        return as_matrix(tensor) if strata is None else strata.part(tensor)

    def mask(self) -> Tensor:
        """The selected rows as a boolean mask ``(m,)`` on the CPU."""
        if self.layer is not None:
            indices, size = self.layer.selected, self.layer.shape[self.layer.dim]
        else:
            indices, size = self.state["indices"], self.own(self.parameter).shape[self.state["dim"]]
        mask = torch.zeros(size, dtype=torch.bool, device="cpu")
        mask[indices.cpu()] = True
        return mask


class SelectionHistory:
    """Follows every selection that an optimizer makes; :meth:`record` summarises them.

    ::

        history = grass.diagnostics.SelectionHistory(optimizer)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            print(history.record())  # {"turnover": 0.31, "energy": 0.87, "coverage": 0.64}
            optimizer.zero_grad()

    Hooks on ``optimizer.step()`` see each refresh, so :meth:`record` may be called rarely. With ``offload`` they look
    when the next step begins, and :meth:`record` waits until the host has finished. In dense mode it computes
    the row norms of every gradient; in compact mode it costs nearly nothing. Layers have their names in the model if
    the optimizer was given named parameters, as by ``GrassAdamW(model)``.

    Of sharded weights every rank has to call :meth:`record`. Where ranks divide a weight along the selected dimension,
    each records the rows of its own part.

    Args:
        optimizer: a :class:`grass.GrassAdamW` in either mode, or any optimizer after :func:`grass.attach`. Pass the
            inner optimizer of a wrapper, not the wrapper.
        keep: keep every record and every selection for :meth:`table` and :meth:`mask`. Their memory grows with the
            run: pass ``False`` in a long run that only logs.

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
        self._tracked: dict[int, Tracked] = {}
        self._unseen = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def record(self) -> dict[str, float]:
        """Current turnover, energy and coverage, means over the layers. Call it between step and zero_grad.

        Without gradients dense mode repeats the energy of the last record that had them. Energy is NaN until it was
        measured: in compact mode before the first refresh, and always if the rule reads no norms
        (``selection="uniform"``).

        Raises:
            RuntimeError: the optimizer has not stepped yet.
        """
        self._look()
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
        return {measure: mean([getattr(row, measure) for row in rows]) for measure in MEASURES}

    def table(self) -> pd.DataFrame:
        """All records as a ``pandas.DataFrame`` with the columns of :class:`LayerRecord`."""
        frame: pd.DataFrame = optional("pandas", "The table of a history").DataFrame(
            self.records, columns=list(LayerRecord._fields)
        )
        return frame

    def layers(self) -> list[str]:
        """Names of the layers seen so far, in the optimizer's order."""
        self._look()
        return [self._tracked[position].name for position in sorted(self._tracked)]

    def mask(self, layer: str) -> NDArray[np.bool_]:
        """Which rows of a layer were selected in each step: boolean ``(steps, m)``, for an image.

        Explored rows, which train too, are not marked, and no row is in steps before a loaded state.

        Raises:
            ValueError: no layer has this name, or the history does not keep selections.
        """
        self._look()
        tracked = next((t for t in self._tracked.values() if t.name == layer), None)
        if tracked is None or not self.keep:
            raise ValueError(f"No selections of {layer!r} (keep={self.keep}); layers: {', '.join(self.layers())}")
        mask = np.zeros((self.step, len(tracked.ever)), dtype=bool)
        for start, indices in tracked.selections:
            mask[start:] = False
            mask[start:, indices] = True
        return mask

    def state_dict(self) -> dict[str, Any]:
        """The state to continue from in a resumed run, as JSON takes it, without records and masks."""
        self._look()
        layers = {str(position): tracked.state_dict() for position, tracked in self._tracked.items()}
        return {"step": self.step, "layers": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Call it before the first step; it does not load the optimizer."""
        self.step = state["step"]
        for position, saved in state["layers"].items():
            self._tracked[int(position)] = Tracked.from_state_dict(saved, self.step)

    def close(self) -> None:
        """Stop following. Records stay."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Follow active rows from before their first refresh."""
        self._look()
        for item in self._selected():
            if item.layer is not None:
                self._follow(item, self.step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.step += 1
        self._unseen = True
        if getattr(optimizer, "offload", None) is None:
            self._look()

    def _look(self) -> None:
        """Follow what the last step has selected."""
        if not self._unseen:
            return
        self._unseen = False
        if (offload := getattr(self.optimizer, "offload", None)) is not None:
            offload.finish()
        for item in self._selected():
            self._follow(item, self.step - (item.layer is None))

    def _follow(self, item: _Selected, start: int) -> None:
        """Remember a selection if it is new, as that of the steps from ``start`` on."""
        tracked, refreshes = self._tracked.get(item.position), item.state.get("refreshes", 1)
        norms, made = (None, 0) if item.layer is None else (item.layer.norms, item.layer.selections)
        if tracked is not None and tracked.refreshes == refreshes and tracked.made == made:
            return
        selected = item.mask()
        if tracked is None:
            tracked = self._tracked[item.position] = Tracked(item.name, selected, selected.clone(), refreshes)
        else:
            tracked.reselect(selected)
            tracked.refreshes = refreshes
        tracked.made = made
        if norms is not None:
            tracked.measure(norms)
        if self.keep:
            tracked.note(start)

    def _selected(self) -> Iterator[_Selected]:
        """The parameters that have a selection now. Wrappers may replace parameters between two steps."""
        layers, position = by_active_rows(self._layers), 0
        for group in self.optimizer.param_groups:
            for p, name in zip(group["params"], parameter_names(group, position), strict=True):
                layer, state = layers.get(id(p)), self.optimizer.state.get(p, {})
                whole = "indices" in state and not is_batch(p, group)
                if layer is not None or whole:
                    yield _Selected(position, name.rpartition(".")[0] or name, p, layer, state)
                position += 1


def _selects(p: Tensor, group: dict[str, Any], layers: dict[int, CompactLayer]) -> bool:
    return id(p) in layers or ("rank" in group and is_projected(p, group))


def _dense_norms(item: _Selected) -> Tensor:
    assert item.parameter.grad is not None
    return row_norms(item.own(item.parameter.grad.detach()), item.state["dim"])
