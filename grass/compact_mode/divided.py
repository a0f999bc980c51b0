r"""Converted layers whose weight is a ``DTensor`` that the ``p`` ranks of one dimension of a mesh divide.

The active rows are a ``DTensor`` too. Where it is divided along the selected dimension, each rank's part is a stratum,
of which the rank selects and explores rows by draws of its own (:mod:`grass.compact_mode.strata`).

``fully_shard`` may follow, over another dimension of the mesh; the ranks that divide the layer are then the last one.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from grass.compact_mode.layer import CompactLayer
from grass.parallel.shards import own_part, shard_dim
from grass.state.schema import State
from grass.state.strata import Strata


class StratumLayer(CompactLayer):
    """A converted layer of which a rank may have a stratum."""

    def _strata(self) -> Strata:
        """How the ranks divide it."""
        raise NotImplementedError

    def saved_state(self, state: State) -> State:
        """:meth:`grass.state.strata.Strata.saved_state`."""
        active = self.selected_part(self.rows()) if "active" in state else None
        return self._strata().saved_state(state, active)

    def held_state(self, state: State) -> State:
        """:meth:`grass.state.strata.Strata.held_state`."""
        return self._strata().held_state(state)


class DividedLayer(StratumLayer):
    """A converted layer that ranks divide; ``chosen`` and ``rank`` are of this rank's stratum."""

    def row_placement(self) -> Placement:
        """How the ranks divide the active rows."""
        raise NotImplementedError

    @property
    def strata(self) -> int:  # type: ignore[override]
        """Into how many parts the ranks divide what is selected."""
        return self._ranks if shard_dim(self.row_placement()) == self.dim else 1

    @property
    def stratum(self) -> int:  # type: ignore[override]
        """Which of them is this rank's."""
        return self._place if self.strata > 1 else 0

    @property
    def _ranks(self) -> int:
        """``p``."""
        return int(self.weight.device_mesh.shape[-1])

    @property
    def _place(self) -> int:
        """This rank's, of ``p``."""
        return int(self.weight.device_mesh.get_coordinate()[-1])

    def as_parameter(self, rows: Tensor) -> nn.Parameter:
        """This rank's part of the active rows as a parameter that the ranks divide."""
        return nn.Parameter(DTensor.from_local(rows, self.weight.device_mesh, [self.row_placement()], run_check=False))

    def of_stratum(self, tensor: Tensor) -> Tensor:
        """The stratum's part of the weight, the parameter or its gradient, sharded as FSDP2 shards it."""
        return tensor if self.strata == 1 else own_part(tensor, tensor.device_mesh.ndim - 1)  # type: ignore[attr-defined]

    def _strata(self) -> Strata:
        active = self.active
        mesh, placements = active.device_mesh, active.placements  # type: ignore[attr-defined]
        return Strata(mesh, mesh.ndim - 1, placements, self.dim, self.shape)

    def _placed(self, part: Tensor) -> DTensor:
        """The ``DTensor`` that has ``part`` as this rank's part, divided as the weight is."""
        return DTensor.from_local(part, self.weight.device_mesh, self.weight.placements, run_check=False)
