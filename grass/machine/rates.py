"""How fast a machine copies and updates: measured in about a second, stored, used to predict schedules.

Tensors of measurements hold ones: pages that nobody has written yet share one page of zeros, which reads too fast.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from grass.cpu import kernel
from grass.device import has_streams, name_of, synchronize, total_bytes
from grass.machine.link import Link
from grass.machine.numa import host_threads, prepare_thread

RESOURCES = ("down", "up", "host", "device")
"""Copies from device to host, copies from host to device, updates on the CPU, updates on the device."""
SECONDS = 0.25
"""How long each measurement takes, and one repetition more."""
COLUMNS = 1024
HOST_ROWS = 4096
DEVICE_ROWS = 32768
"""Rows of the updates: 64 MiB of weights, gradients and moments on the CPU, 512 MiB on the device, more than caches."""
GPU_SIDE, CPU_SIDE = 8192, 1024
"""The side of the square matrices of a product."""
LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 20
"""Bytes of one copy."""


class Work(Protocol):
    """An amount of work for one resource, such as a copy or a step of one parameter."""

    resource: str
    amount: float


@dataclass(frozen=True)
class Machine:
    """Rates of the four resources, and the device's memory.

    Attributes:
        host_rate: elements that AdamW updates on the CPU in a second, in float32.
        down_rate: bytes copied from the device in a second.
        up_rate: bytes copied to the device in a second.
        device_rate: elements that AdamW updates on the device in a second, in float32.
        compute_rate: floating-point operations of a large matrix product on the device in a second; infinite if it was
            not measured, so that predictions leave computing out.
        name: which hardware has these rates, as :func:`machine_name` says; empty if none in particular.
        memory: bytes of the device; 0 if they are not known.

    Raises:
        ValueError: a rate is not > 0, or the memory is not >= 0.
    """

    host_rate: float
    down_rate: float
    up_rate: float
    device_rate: float
    name: str = ""
    compute_rate: float = math.inf
    memory: int = 0

    def __post_init__(self) -> None:
        for name in (*(f"{resource}_rate" for resource in RESOURCES), "compute_rate"):
            if not (rate := getattr(self, name)) > 0:
                raise ValueError(f"Invalid {name}={rate}. Must be > 0.")
        if not self.memory >= 0:
            raise ValueError(f"Invalid memory={self.memory}. Must be >= 0.")

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
                host = thread.submit(host_rate).result()
        finally:
            torch.set_num_threads(before)
        return cls(
            host,
            *link_rates(link),
            device_rate(link.device),
            name,
            compute_rate(link.device),
            total_bytes(link.device),
        )

    def rate(self, resource: str) -> float:
        """Bytes or elements a second of a resource.

        Raises:
            ValueError: there is no such resource.
        """
        if resource not in RESOURCES:
            raise ValueError(f"Invalid {resource=}. Must be in {RESOURCES}.")
        rate: float = getattr(self, f"{resource}_rate")
        return rate

    def seconds(self, task: Work) -> float:
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
            ValueError: they are of other hardware or another number of threads, or not
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
            ValueError: they are not
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
    return f"{name}, {name_of(torch.device(device))}"


def processor() -> str:
    """The processor's name."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def host_rate() -> float:
    """Elements a second of an AdamW step on the CPU, by the C++ kernel if it can be built."""
    if not kernel.at_hand():
        return _torch_rate(torch.device("cpu"), HOST_ROWS)
    values, grad, exp_avg, exp_avg_sq = (
        torch.ones(HOST_ROWS, COLUMNS, dtype=torch.float32, device="cpu") for _ in range(4)
    )
    indices = torch.arange(HOST_ROWS, device="cpu")

    def step() -> None:
        batch = kernel.Batch(True)
        batch.add(kernel.Weight(None, indices, 0, grad, values, exp_avg, exp_avg_sq, 1, 1e-3, 1.0))
        batch.run(betas=(0.9, 0.999), eps=1e-8, maximize=False)

    return values.numel() / _seconds(step)


def device_rate(device: torch.device) -> float:
    """Elements a second of ``torch.optim.AdamW(fused=True)`` on the device."""
    return _torch_rate(device, DEVICE_ROWS if has_streams(device) else HOST_ROWS)


def link_rates(link: Link) -> tuple[float, float]:
    """Bytes a second from the device and to it, measured at the same time."""
    options: dict[str, Any] = {"dtype": torch.float32}
    device, host = (torch.ones(LEAST_BYTES // 4, device=place, **options) for place in (link.device, "cpu"))
    link.down(device, host)  # once, to be ready
    start = time.perf_counter()
    link.down(device, host)
    probed = LEAST_BYTES / (time.perf_counter() - start)
    elements = int(min(MOST_BYTES, max(LEAST_BYTES, probed * SECONDS / 5))) // 4

    def rate(copy: Callable[[Tensor, Tensor], None], source: Tensor, out: Tensor) -> float:
        return source.nbytes / _seconds(lambda: copy(source, out))

    with ThreadPoolExecutor(2) as threads:
        made = [torch.ones(elements, device=device, **options) for device in (link.device, "cpu", "cpu", link.device)]
        down = threads.submit(rate, link.down, *made[:2])
        up = threads.submit(rate, link.up, *made[2:])
        return down.result(), up.result()


def compute_rate(device: torch.device) -> float:
    """Floating-point operations a second of a large product: in bfloat16 on a GPU, in float32 on the CPU."""
    side, dtype = (GPU_SIDE, torch.bfloat16) if has_streams(device) else (CPU_SIDE, torch.float32)
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))

    def multiply() -> None:
        a @ b
        synchronize(device)

    return 2 * a.shape[0] ** 3 / _seconds(multiply)


def _torch_rate(device: torch.device, rows: int) -> float:
    weight = torch.ones(rows, COLUMNS, dtype=torch.float32, device=device)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step() -> None:
        optimizer.step()
        synchronize(device)

    return weight.numel() / _seconds(step)


def _seconds(work: Callable[[], object]) -> float:
    """The median time of work, repeated for :data:`SECONDS` and at least once, after one repetition that warms up."""
    work()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)
