"""Where offloaded state and host copies lie: in host memory, or in memory-mapped files that may exceed it.

:func:`grass.stream` marks the parameters that lie on the host while their module computes on a device. Whoever copies
their values to a device waits for their step first.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from grass.compact_mode.layer import CompactLayer
from grass.offload.options import Offload
from grass.options import Options, as_matrix, resolve_dim
from grass.parallel.host_meshes import HostMeshes
from grass.parallel.shards import is_sharded, local
from grass.state.master import keeps_master
from grass.state.schema import State

SMALLEST = 1 << 16
"""Bytes from which a tensor goes to a file."""
MARK = "_grass_on_host"


class HostStorage:
    """Keeps tensors in files of a directory. Without a directory it leaves them where they are.

    The files are working memory, not a checkpoint: they are made when the optimizer steps first and go with it.

    Args:
        path: the directory, made if it is not there; ``None``: no files.

    Attributes:
        meshes: how the ranks communicate about what is stored.

    Raises:
        ValueError: the path is not a directory that can be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._directory: Path | None = None
        self._count = 0
        self.meshes = HostMeshes()
        if path is None:
            return
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            self._directory = Path(tempfile.mkdtemp(prefix="grass-", dir=path))
        except OSError as error:
            raise ValueError(f"Invalid path={os.fspath(path)!r}: must be a directory that can be written") from error
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)

    def check_room(self, nbytes: int, what: str = "offloaded state") -> None:
        """Check that what will be stored fits.

        Args:
            nbytes: how much will be stored.
            what: its name in the error.

        Raises:
            OSError: the disk has less space, before anything was written.
            MemoryError: there are no files, and host memory has less space.
        """
        if self._directory is None:
            if (free := free_memory()) is not None and free < nbytes:
                raise MemoryError(
                    f"{what} needs {nbytes / 1e9:.2f} GB of host memory, of which {free / 1e9:.2f} are free: a "
                    "path= keeps it in files"
                )
        elif (free := shutil.disk_usage(self._directory).free) < nbytes:
            raise OSError(
                errno.ENOSPC,
                f"{what} needs {nbytes / 1e9:.2f} GB in {self._directory.parent}, which has {free / 1e9:.2f}",
            )

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and dtype on the host, in a file if it is large enough."""
        if self._directory is None or tensor.nbytes < SMALLEST:
            return host_like(tensor)
        name = str(self._directory / f"{self._count}.bin")
        self._count += 1
        with open(name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk is an error here, not a crash later
        flat = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype, device="cpu")
        os.unlink(name)  # the mapping keeps it; nothing is left behind, also after a crash
        strides = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
        return flat.as_strided(tensor.shape, strides)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, stored. Of a ``DTensor`` this rank's part is copied; the copy is a ``DTensor`` too."""
        own = local(tensor.detach())
        copy = self.empty_like(own).copy_(own)
        return self.shard(copy, tensor)

    def shard(self, own: Tensor, like: Tensor) -> Tensor:
        """``own``, as a ``DTensor`` if ``like`` is one."""
        return self.meshes.shard(own, like) if is_sharded(like) else own

    def to_host_(self, state: State) -> None:
        """Move all tensors of a state to host memory, in place."""
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.device.type != "cpu" or is_sharded(value)):
                state[key] = self.shard(to_host(local(value)), value)

    def store_(self, state: State, stored: dict[str, Tensor]) -> None:
        """Store the tensors of a state, in place.

        Args:
            state: gets stored tensors in place of those that a step has made.
            stored: those that were stored before, by key; updated.
        """
        if self._directory is None:
            return
        for key, value in state.items():
            if key == "master":  # has been here from the beginning, or is small
                continue
            if isinstance(value, Tensor) and value.nbytes >= SMALLEST and stored.get(key) is not value:
                held = stored.get(key)
                fits = held is not None and same_layout(held, value)
                stored[key] = state[key] = held.copy_(value) if fits and held is not None else self.copy(value)
        for key in set(stored) - set(state):
            del stored[key]


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process can still get, swap included; ``None`` where Linux does not say.

    Args:
        root: of the file system, with ``/proc`` and ``/sys``.
    """
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        free = sum(int(fields[key].split()[0]) << 10 for key in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return None
    try:  # a container may have less; what it has cached of files can be had again
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
    except (OSError, KeyError, ValueError):
        return free


def host_like(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape, strides and dtype in host memory."""
    return torch.empty_like(tensor, device="cpu", memory_format=torch.preserve_format)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory with the same strides."""
    return host_like(tensor).copy_(tensor.detach())


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, strides and dtype."""
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def bytes_on_host(p: Tensor, layer: CompactLayer | None, options: Options, offload: Offload) -> int:
    """Bytes that a parameter's copies, moments and bank take on this rank's host. Moments are counted as float32.

    A parameter that lies there already (:func:`mark_on_host`) has no copies but its master.
    """
    p = local(p.detach())
    weight = p if layer is None else local(layer.weight.detach())
    has_master = offload.has_master(p) or (keeps_master(p) and not options.projects(p))
    copies = 4 * p.numel() * has_master if layer is None else weight.nbytes
    if not is_on_host(p):
        copies += p.nbytes
    elif layer is not None:
        copies = 0
    values = p.numel()
    if layer is None and options.projects(p):
        matrix = as_matrix(p)
        size = matrix.shape[resolve_dim(options.dim, matrix.shape)]
        values = p.numel() // max(size, 1) * options.selected(size)
    bank = 0
    if options.state_policy == "bank" and (layer is not None or options.projects(p)):
        bank = 2 * weight.numel() * getattr(torch, options.bank_dtype).itemsize
    return copies + 8 * values + bank


def mark_on_host(parameter: Tensor) -> None:
    """Say that a parameter lies on the host while its module computes on a device."""
    setattr(parameter, MARK, _Ending())


def unmark_on_host(parameter: Tensor) -> None:
    """The opposite of :func:`mark_on_host`."""
    if is_on_host(parameter):
        delattr(parameter, MARK)


def is_on_host(parameter: Tensor) -> bool:
    """Whether a parameter is marked."""
    return hasattr(parameter, MARK)


def note_step(parameter: Tensor, wait: Callable[[], object]) -> None:
    """Note how to wait for the step of a parameter that is marked."""
    if is_on_host(parameter):
        setattr(parameter, MARK, _Ending(wait))


def wait_for_step(parameter: Tensor) -> None:
    """Wait for the step of a marked parameter, from any thread. Raises what the step raised."""
    if (ending := getattr(parameter, MARK, None)) is not None and ending.wait is not None:
        ending.wait()


class _Ending:
    """How to wait for a step. Copies have nothing to wait for."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self.wait = wait

    def __reduce__(self) -> tuple[type[_Ending], tuple[()]]:
        return _Ending, ()
