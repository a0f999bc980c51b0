"""Where offloaded state and host copies lie: in host memory, or in memory-mapped files that may exceed it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from grass.parallel.host_meshes import HostMeshes
from grass.parallel.shards import is_sharded, local
from grass.state.schema import State

SMALLEST = 1 << 16
"""Bytes from which a tensor goes to a file."""


class Home:
    """Gives tensors a place in files of a directory. Without a directory it leaves them where they are.

    The files are working memory, not a checkpoint: they are made when the optimizer steps first and go with it.

    Args:
        path: the directory, made if it is not there; ``None``: no files.

    Attributes:
        meshes: how the ranks communicate about what lies here.

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
        """Check that what will come home fits.

        Args:
            nbytes: how much will come.
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
        flat = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        os.unlink(name)  # the mapping keeps it; nothing is left behind, also after a crash
        strides = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
        return flat.as_strided(tensor.shape, strides)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, at home. Of a ``DTensor`` this rank's part is copied; the copy is a ``DTensor`` too."""
        own = local(tensor.detach())
        copy = self.empty_like(own).copy_(own)
        return self.shard(copy, tensor)

    def shard(self, own: Tensor, like: Tensor) -> Tensor:
        """``own``, as a ``DTensor`` if ``like`` is one."""
        return self.meshes.shard(own, like) if is_sharded(like) else own

    def bring(self, state: State) -> None:
        """Move all tensors of a state to host memory, in place."""
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.device.type != "cpu" or is_sharded(value)):
                state[key] = self.shard(to_host(local(value)), value)

    def settle(self, state: State, at_home: dict[str, Tensor]) -> None:
        """Bring the tensors of a state home.

        Args:
            state: gets tensors that are at home in place of those that a step has made.
            at_home: those that were brought before, by key; updated.
        """
        if self._directory is None:
            return
        for key, value in state.items():
            if key == "master":  # has been here from the beginning, or is small
                continue
            if isinstance(value, Tensor) and value.nbytes >= SMALLEST and at_home.get(key) is not value:
                held = at_home.get(key)
                fits = held is not None and same_layout(held, value)
                at_home[key] = state[key] = held.copy_(value) if fits and held is not None else self.copy(value)
        for key in set(at_home) - set(state):
            del at_home[key]


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
