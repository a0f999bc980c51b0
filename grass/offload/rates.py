"""Short measurements of updates and copies.

Tensors hold ones: pages that nobody has written yet share one page of zeros, which reads too fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch
from torch import Tensor

from grass.cpu import kernel
from grass.offload.link import Link

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


def host_rate() -> float:
    """Elements a second of an AdamW step on the CPU, by the C++ kernel if it can be built."""
    if not kernel.at_hand():
        return _torch_rate(torch.device("cpu"), HOST_ROWS)
    values, grad, exp_avg, exp_avg_sq = (torch.ones(HOST_ROWS, COLUMNS, dtype=torch.float32) for _ in range(4))
    indices = torch.arange(HOST_ROWS)

    def step() -> None:
        batch = kernel.Batch(True)
        batch.add(kernel.Weight(None, indices, 0, grad, values, exp_avg, exp_avg_sq, 1, 1e-3, 1.0))
        batch.run(betas=(0.9, 0.999), eps=1e-8, maximize=False)

    return values.numel() / _seconds(step)


def device_rate(device: torch.device) -> float:
    """Elements a second of ``torch.optim.AdamW(fused=True)`` on the device."""
    return _torch_rate(device, DEVICE_ROWS if device.type == "cuda" else HOST_ROWS)


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
    cuda = device.type == "cuda"
    side, dtype = (GPU_SIDE, torch.bfloat16) if cuda else (CPU_SIDE, torch.float32)
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))

    def multiply() -> None:
        a @ b
        if cuda:
            torch.cuda.synchronize(device)

    return 2 * a.shape[0] ** 3 / _seconds(multiply)


def _torch_rate(device: torch.device, rows: int) -> float:
    weight = torch.ones(rows, COLUMNS, dtype=torch.float32, device=device)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step() -> None:
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

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
