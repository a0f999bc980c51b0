"""Which processors step on the host: how many threads, and on which NUMA node.

A machine with several NUMA nodes has several memories. A device hangs on one of them, and its copies are fastest
there. Linux says which in ``/sys``; every function takes that directory as ``root``. Elsewhere nothing is bound, and
the number of threads is torch's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from grass.cpu.kernel import use_threads
from grass.device import pci_address

SYSFS = Path("/sys")
Cpus = frozenset[int]
_OF_THIS_THREAD = threading.local()


def host_threads(device: torch.device, numa: int | str | None = "auto", root: Path = SYSFS) -> int:
    """How many threads step on the host if ``grass.Offload(threads=None)`` leaves it open.

    For a CPU as the device: as many as torch uses, so that results are those of the resident optimizer. For other
    devices: the physical cores of the node that is given, else of the node that the device hangs on, else of all nodes.
    Two processors of one core count once. Only processors that this process may use count, and at most as many as its
    control group has time for. The processes that torchrun starts on a machine share its cores.

    Args:
        device: that of the parameters.
        numa: as in :class:`grass.Offload`.
        root: as ``/sys``.
    """
    allowed = _allowed()
    if device.type == "cpu" or not allowed:
        return torch.get_num_threads()
    node = numa if isinstance(numa, int) else node_of(device, root)
    near = nodes(root).get(-1 if node is None else node, allowed) & allowed
    share = physical_cores(allowed, root) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(physical_cores(near or allowed, root), share, _quota(root)))


def prepare_thread(threads: int | None, numa: int | str | None, device: torch.device) -> None:
    """Give the calling thread its number of threads, and bind it, the first time, to its node.

    OpenMP's threads inherit the binding of the thread that starts them, and memory is taken from the node whose thread
    writes it first.

    Args:
        threads: as in :class:`grass.Offload`.
        numa: as in :class:`grass.Offload`.
        device: that of the parameters.
    """
    asked = threads, numa, device
    if getattr(_OF_THIS_THREAD, "prepared", None) == asked:
        return
    if not hasattr(_OF_THIS_THREAD, "prepared") and (cpus := bound_cpus(device, numa)):
        os.sched_setaffinity(0, cpus)  # 0: the calling thread
    is_open = threads is None and device.type != "cpu"
    use_threads(host_threads(device, numa) if is_open else threads)
    _OF_THIS_THREAD.prepared = asked


def bound_cpus(device: torch.device, numa: int | str | None, root: Path = SYSFS) -> Cpus:
    """The processors that the host's thread is bound to; none: it is not bound.

    Args:
        device: that of the parameters.
        numa: as in :class:`grass.Offload`.
        root: as ``/sys``.
    """
    allowed, found = _allowed(), nodes(root)
    if numa == "auto":
        numa = node_of(device, root) if len(found) > 1 else None
    return found.get(numa, Cpus()) & allowed if isinstance(numa, int) else Cpus()


def check_node(numa: int, root: Path = SYSFS) -> None:
    """Check that the host's thread can be bound to a node.

    Raises:
        ValueError: there is no such node, or this process may use none of its processors.
    """
    allowed, found = _allowed(), nodes(root)
    usable = [node for node, cpus in found.items() if cpus & allowed]
    if found and numa not in usable:
        names = ", ".join(map(str, usable))
        raise ValueError(f"Invalid numa={numa}: the nodes that this process may use are {names}")


def nodes(root: Path = SYSFS) -> dict[int, Cpus]:
    """The processors of each NUMA node that has any; empty where the system does not say."""
    files = root.glob("devices/system/node/node[0-9]*/cpulist")
    found = {int(file.parent.name.removeprefix("node")): _cpus(file.read_text()) for file in files}
    return {node: cpus for node, cpus in sorted(found.items()) if cpus}


def node_of(device: torch.device, root: Path = SYSFS) -> int | None:
    """The NUMA node that a device hangs on; ``None`` for a CPU, and where torch or the system does not say."""
    if (address := pci_address(device)) is None:
        return None
    file = root / "bus/pci/devices" / address / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return node if node in nodes(root) else None


def physical_cores(cpus: Iterable[int], root: Path = SYSFS) -> int:
    """How many cores these processors are on."""
    files = {cpu: root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus}
    return len({_cpus(file.read_text()) if file.exists() else Cpus({cpu}) for cpu, file in files.items()})


def _allowed() -> Cpus:
    """The processors that this process may use, as its main thread has them; empty where the system does not say."""
    return Cpus(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else Cpus()


def _quota(root: Path) -> int:
    """How many processors the time of this control group is worth."""
    file = root / "fs/cgroup/cpu.max"
    quota, period = file.read_text().split() if file.exists() else ("max", "1")
    return 1 << 20 if quota == "max" else max(1, int(quota) // int(period))


def _cpus(text: str) -> Cpus:
    """Processors of a list such as ``0-3,8``."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return Cpus(cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1))
