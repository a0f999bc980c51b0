"""Bandwidth of ``compact_adamw_8bit_``: python scripts/bench/kernels/compact_adamw_8bit.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import DEVICE, Case, main, operands, picked, randn

from grass import kernels
from grass.kernels.moment_codes import BLOCK

# bytes per trained element, as the kernel's docstring counts them
VARIANTS = {
    "float32 rows over bf16": (18 + 16 / BLOCK, True, None),
    "bf16 weight, stochastic rounding": (10 + 16 / BLOCK, False, 7),
}


def cases() -> Iterator[Case]:
    for (m, n), r in operands():
        for dim in (0, 1):
            for name, (each, has_rows, key) in VARIANTS.items():

                def step(m=m, n=n, r=r, dim=dim, has_rows=has_rows, key=key):
                    shape = (r, n) if dim == 0 else (m, r)
                    weight, indices, ages = randn(m, n), picked((m, n)[dim], r), torch.full((r,), 9.0, device=DEVICE)
                    codes = [torch.randint(0, 255, shape, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
                    scales = [torch.full((-(-r * shape[1 - dim] // BLOCK),), 1e-3, device=DEVICE) for _ in range(2)]
                    rows = randn(*shape, dtype=torch.float32) if has_rows else None
                    grad = randn(*shape, dtype=torch.float32) if has_rows else randn(m, n)
                    if dim == 1:  # compact mode holds such weights with their columns contiguous
                        weight, grad, *codes = (t.t().contiguous().t() for t in (weight, grad, *codes))
                        rows = None if rows is None else rows.t().contiguous().t()
                    every = {"rows": None if rows is None else [rows], "keys": None if key is None else [key]}
                    options = {"dim": dim, "gather_grad": not has_rows, "step_size": 1e-4, **every}
                    tensors = [[t] for t in (weight, indices, grad, codes[0], scales[0], codes[1], scales[1], ages)]
                    return lambda: kernels.compact_adamw_8bit_(*tensors, **options, moment_keys=[5])

                size = r * (n if dim == 0 else m)
                case = f"{m}x{n} r={r} dim={dim} {name}"
                yield Case(kernel="compact_adamw_8bit", case=case, make=step, bytes=round(each * size))


if __name__ == "__main__":
    main("compact_adamw_8bit", cases, __doc__)
