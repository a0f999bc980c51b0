"""How ranks communicate about tensors in host memory: groups of gloo of the same ranks, and sharded tensors on them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from grass.parallel.ranks import Ranks


class HostMeshes:
    """Gives local tensors in host memory a place among the ranks, as sharded tensors have it on their devices.

    The groups are gloo's and of their own, so a thread may communicate while the model does.
    """

    def __init__(self) -> None:
        self._meshes: dict[Any, Any] = {}
        self._ranks: dict[Any, Ranks] = {None: Ranks(None)}

    def ranks(self, ranks: Ranks) -> Ranks:
        """The same ranks, for tensors in host memory. Every rank has to call this."""
        if ranks.group not in self._ranks:
            self._ranks[ranks.group] = Ranks(_on_gloo(dist.get_process_group_ranks(ranks.group)))
        return self._ranks[ranks.group]

    def shard(self, own: Tensor, like: Any) -> Tensor:
        """The ``DTensor`` that has ``own`` as this rank's part.

        Every rank of the mesh has to call this: the first call for a mesh makes its groups.

        Args:
            own: in host memory, of the shape of this rank's part of ``like``.
            like: a ``DTensor``.
        """
        mesh = like.device_mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = _on_host(mesh)
        shape = {"shape": like.shape, "stride": like.stride()}
        sharded: Tensor = type(like.data).from_local(own, self._meshes[mesh], like.placements, run_check=False, **shape)
        return sharded


def _on_host(mesh: Any) -> Any:
    """A mesh of the same ranks, each dimension with a group of gloo."""
    groups = [_on_gloo(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in range(mesh.ndim)]
    of = groups[0] if mesh.ndim == 1 else groups
    return type(mesh).from_group(of, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _on_gloo(ranks: list[int]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return group
