"""After a step that an exception has ended in the middle, as Ctrl-C in a notebook does.

With ``offload=`` a step is made or none, and needs nothing of this.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.compact_mode.refresh_cycle import drawn_beside
from grass.options import Options
from grass.state.refresh import refresh_due
from grass.state.schema import State

logger = logging.getLogger("grass")

COUNTERS = {"step", "refresh_step", "refreshes", "indices"}
"""What a state with selected rows has when a step has ended."""


def mend(groups: list[dict[str, Any]], states: Mapping[Tensor, State], layers: Mapping[int, CompactLayer]) -> None:
    """Make weights, active rows and moments agree.

    Active rows take the values of the weight where they differ. A state begins anew if its rows are not those of the
    layer, if the step should have selected rows and may have moved the moments only, or if it was never complete.
    """
    lost, every = 0, [(p, group) for group in groups for p in group["params"]]
    for position, (p, group) in enumerate(every):
        options, layer, state = Options.of(group), layers.get(id(p)), states.get(p, {})
        if state and (layer is not None or "indices" in state) and not _is_whole(state, options, layer):
            state.clear()
            lost += 1
        if layer is not None and not layer.synced.late:
            _mend_rows(layer, (options.seed, layer.place(position), state.get("step", 0)))
    logger.warning(
        "Grass: the last step was interrupted: some parameters were stepped, others not. %s",
        f"Moments of {lost} weights begin anew" if lost else "No moments are lost",
    )


@torch.no_grad()
def _mend_rows(layer: CompactLayer, key: tuple[int, int, int]) -> None:
    """Explore rows that are not selected, which old ones may be, and let the weight decide on all values."""
    if layer.reach:
        layer.explored.copy_(drawn_beside(layer.selected, layer, key))
    layer.reload_changed()
    layer.mark_synced()


def _is_whole(state: State, options: Options, layer: CompactLayer | None) -> bool:
    if not state.keys() >= COUNTERS or "exp_avg" not in state or refresh_due(state, options):
        return False
    return layer is None or torch.equal(state["indices"].to(layer.chosen.device), layer.selected)
