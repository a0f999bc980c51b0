"""Training on several processes, as ``torchrun`` starts them: by DDP or FSDP2."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from grass import GrassAdamW
from grass.distributed import ReducedAllreduceState, reduced_allreduce_hook, shard_placement_fn
from grass.distributed.reduced_allreduce import moves_whole_weights

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Processes:
    """The processes of a run; by default one, for which all of this does nothing.

    Attributes:
        rank: of this process.
        size: how many there are.
        device: of this process.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this process logs and saves."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. They agree in host memory: none waits for its device."""
        if self.size == 1:
            return flag
        dist.all_reduce(flags := torch.tensor(int(flag)), group=_on_hosts(dist.group.WORLD))
        return bool(flags)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


@functools.lru_cache(maxsize=1)
def _on_hosts(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """All processes for tensors in host memory. Every process has to call this."""
    on_cpu = "cpu:" in dist.get_backend_config(world)
    return world if on_cpu else dist.new_group(backend="gloo")


@contextmanager
def launched_processes(device: str) -> Iterator[Processes]:
    """Join the processes of ``torchrun``, one GPU each where there are GPUs; without it, a process alone.

    A process group that is there already is used as it is.

    Args:
        device: ``"auto"`` or a device's name; with several processes ``"cuda"`` means one GPU each.
    """
    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size(), torch.device(name))
        return
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield Processes(device=torch.device(name))
        return
    if name == "cuda":
        name = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(name)
    dist.init_process_group("cpu:gloo,cuda:nccl" if name.startswith("cuda") else "gloo", **_fresh_store())
    try:
        yield Processes(dist.get_rank(), size, torch.device(name))
    finally:
        dist.destroy_process_group()


def _fresh_store() -> dict[str, Any]:
    """Where the processes of this attempt meet.

    The agent of ``torchrun`` keeps one store for all its restarts, in which gloo would find the addresses of processes
    that are gone: each attempt gets a prefix of its own.
    """
    store, rank, size = next(iter(rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": PrefixStore(f"attempt_{attempt}", store), "rank": rank, "world_size": size}


def shard_module(module: nn.Module) -> None:
    """``fully_shard`` a decoder layer, or the model once its layers are sharded, as Grass needs it."""
    fully_shard(module, shard_placement_fn=shard_placement_fn(module))


def data_parallel(model: nn.Module, optimizer: Optimizer, processes: Processes) -> nn.Module:
    """The module to call: the model itself where it is alone or sharded, else DDP around it.

    Dense Grass gets the reduced all-reduce, unless all rows move.
    """
    if processes.size == 1 or isinstance(model, FSDPModule):
        return model
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if isinstance(optimizer, GrassAdamW) and not moves_whole_weights(optimizer):
        ddp.register_comm_hook(ReducedAllreduceState(optimizer), reduced_allreduce_hook)
    return ddp


def whole_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """A sharded model's ``state_dict``, gathered, which every process has to ask for; ``None`` where it is whole."""
    if not isinstance(model, FSDPModule):
        return None
    weights: dict[str, Any] = dcp.get_model_state_dict(model, options=WHOLE)
    return weights


def is_divided(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether each process holds a part of the optimizer's state: of a sharded model or a sharded bank."""
    shares = any(group.get("shard_bank", False) for group in optimizer.param_groups)
    return isinstance(model, FSDPModule) or (shares and dist.is_initialized())


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict``, gathered likewise."""
    if is_divided(model, optimizer):
        return dict(dcp.get_optimizer_state_dict(model, optimizer, options=WHOLE))
    return optimizer.state_dict()


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load :func:`whole_optimizer_state`, each process its part."""
    if is_divided(model, optimizer):
        dcp.set_optimizer_state_dict(model, optimizer, state, options=dcp.StateDictOptions(full_state_dict=True))
    else:
        optimizer.load_state_dict(state)
