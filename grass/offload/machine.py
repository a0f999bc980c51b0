"""How fast a machine copies and updates: measured in about a second, stored, used to predict schedules."""

from __future__ import annotations

import json
import math
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from grass.offload import rates
from grass.offload.link import Link
from grass.offload.tasks import RESOURCES, Task
from grass.offload.threads import host_threads, prepare_thread


@dataclass(frozen=True)
class Machine:
    """Rates of the four resources.

    Attributes:
        host_rate: elements that AdamW updates on the CPU in a second, in float32.
        down_rate: bytes copied from the device in a second.
        up_rate: bytes copied to the device in a second.
        device_rate: elements that AdamW updates on the device in a second, in float32.
        compute_rate: floating-point operations of a large matrix product on the device in a second; infinite if it was
            not measured, so that predictions leave computing out.
        name: which hardware has these rates, as :func:`machine_name` says; empty if none in particular.

    Raises:
        ValueError: a rate is not > 0.
    """

    host_rate: float
    down_rate: float
    up_rate: float
    device_rate: float
    name: str = ""
    compute_rate: float = math.inf

    def __post_init__(self) -> None:
        for name in (*(f"{resource}_rate" for resource in RESOURCES), "compute_rate"):
            if not (rate := getattr(self, name)) > 0:
                raise ValueError(f"Invalid {name}={rate}. Must be > 0.")

    @classmethod
    def measure(cls, device: torch.device | str, threads: int | None = None, link: Link | None = None) -> Machine:
        """Measure this machine, each rate for a quarter of a second; the two directions of the link at the same time.

        The host's rate is that of the C++ kernel if it can be built, else of ``torch.optim.AdamW(fused=True)``, in a
        thread as :class:`grass.Offload` has it. The first call on a machine may build the kernel, which takes longer.

        Args:
            device: the device whose state is offloaded.
            threads: of the update on the CPU; ``None``: as many as :class:`grass.Offload` takes by itself.
            link: the link to the device; ``None``: one made for this.

        Raises:
            ValueError: the link is of another device.
        """
        link = link or Link(device)
        if link.device != torch.empty(0, device=device).device:
            raise ValueError(f"The link is to {link.device}, the device is {device}")
        before = torch.get_num_threads()
        torch.set_num_threads(threads or host_threads(link.device))
        try:
            name = machine_name(device, torch.get_num_threads())
            with ThreadPoolExecutor(1, initializer=prepare_thread, initargs=(threads, "auto", link.device)) as thread:
                host = thread.submit(rates.host_rate).result()
        finally:
            torch.set_num_threads(before)
        return cls(host, *rates.link_rates(link), rates.device_rate(link.device), name, rates.compute_rate(link.device))

    def rate(self, resource: str) -> float:
        """Bytes or elements a second of a resource.

        Raises:
            ValueError: there is no such resource.
        """
        if resource not in RESOURCES:
            raise ValueError(f"Invalid {resource=}. Must be in {RESOURCES}.")
        rate: float = getattr(self, f"{resource}_rate")
        return rate

    def seconds(self, task: Task) -> float:
        """How long a task takes: its amount over the rate of its resource."""
        return task.amount / self.rate(task.resource)

    def save(self, path: str | Path) -> None:
        """Write the rates and the machine's name as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str, threads: int | None = None) -> Machine:
        """Read rates that were measured on this machine.

        Args:
            path: a file of :meth:`save`.
            device: as in :meth:`measure`.
            threads: as in :meth:`measure`.

        Raises:
            ValueError: they are of other hardware or another number of threads, or not rates.
        """
        stored, here = cls.read(path), machine_name(device, threads)
        if stored.name != here:
            raise ValueError(f"{path} holds rates of {stored.name!r}, this is {here!r}; measure again")
        return stored

    @classmethod
    def read(cls, path: str | Path) -> Machine:
        """Read rates of any machine.

        Args:
            path: a file of :meth:`save`.

        Raises:
            ValueError: they are not rates.
        """
        try:
            stored = json.loads(Path(path).read_text())
            if stored.keys() == cls.__dataclass_fields__.keys():
                return cls(**stored)
        except (AttributeError, TypeError, ValueError):  # not JSON, no object, no numbers
            pass
        raise ValueError(f"{path} does not hold the rates of a machine; measure again")


def machine_name(device: torch.device | str, threads: int | None = None) -> str:
    """Processor, threads and device, such as ``"AMD EPYC 9654, 16 threads, NVIDIA H100"``.

    Args:
        device: the device.
        threads: of the update on the CPU; ``None``: as many as :class:`grass.Offload` takes by itself.
    """
    name = f"{processor()}, {threads or host_threads(torch.device(device))} threads"
    is_cuda = torch.device(device).type == "cuda"
    return f"{name}, {torch.cuda.get_device_name(device) if is_cuda else torch.device(device).type}"


def processor() -> str:
    """The processor's name."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
