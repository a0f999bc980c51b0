"""Bandwidth of ``scatter_add_rows``: python scripts/bench/kernels/scatter_add_rows.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import DEVICE, Case, main, operands, randn

from grass import kernels


def cases() -> Iterator[Case]:
    for (m, n), r in operands():

        def repeated(m: int = m, n: int = n, r: int = r):
            out, indices, x = randn(m, n), torch.randint(m, (r,), device=DEVICE), randn(r, n)
            scale = torch.rand(r, device=DEVICE)
            return lambda: kernels.scatter_add_rows(out, indices, x, scale)

        case = f"{m}x{n} r={r} bf16 repeated"
        yield Case(kernel="scatter_add_rows", case=case, make=repeated, bytes=6 * r * n)


if __name__ == "__main__":
    main("scatter_add_rows", cases, __doc__)
