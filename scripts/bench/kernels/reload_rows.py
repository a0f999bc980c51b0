"""Bandwidth of ``reload_rows_``: python scripts/bench/kernels/reload_rows.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import Case, main, operands, picked, randn

from grass import kernels

WEIGHTS = 8
"""How many weights a launch copies rows of."""


def cases() -> Iterator[Case]:
    for (m, n), q in operands():

        def reload(m: int = m, n: int = n, q: int = q):
            weights, indices = [randn(m, n) for _ in range(WEIGHTS)], [picked(m, q) for _ in range(WEIGHTS)]
            rows = [randn(q, n, dtype=torch.float32) for _ in weights]
            return lambda: kernels.reload_rows_(rows, weights, indices)

        case = f"{WEIGHTS} of {m}x{n} q={q} float32 rows of bf16"
        yield Case(kernel="reload_rows", case=case, make=reload, bytes=6 * WEIGHTS * q * n, target=0.85)


if __name__ == "__main__":
    main("reload_rows", cases, __doc__)
