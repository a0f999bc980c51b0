"""Bandwidth of ``compact_adamw_``: python scripts/bench/kernels/compact_adamw.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import DEVICE, Case, main, operands, picked, randn

from grass import kernels

# bytes per trained element, as the kernel's docstring counts them
VARIANTS = {
    "float32 rows over bf16": (30, True, None, torch.float32),
    "bf16 weight, full bf16 gradient": (22, False, None, torch.float32),
    "bf16 weight, stochastic rounding": (22, False, 7, torch.float32),
    "float32 rows over bf16, bf16 moments": (22, True, None, torch.bfloat16),
}


def cases() -> Iterator[Case]:
    for (m, n), r in operands():
        for dim in (0, 1):
            for name, (each, has_rows, key, moments) in VARIANTS.items():

                def step(m=m, n=n, r=r, dim=dim, has_rows=has_rows, key=key, moments=moments):
                    shape = (r, n) if dim == 0 else (m, r)
                    weight, indices, first = randn(m, n), picked((m, n)[dim], r), randn(*shape, dtype=moments)
                    second, ages = randn(*shape, dtype=moments).square_(), torch.full((r,), 9.0, device=DEVICE)
                    rows = randn(*shape, dtype=torch.float32) if has_rows else None
                    grad = randn(*shape, dtype=torch.float32) if has_rows else randn(m, n)
                    if dim == 1:  # compact mode holds such weights with their columns contiguous
                        weight, first, second, grad = (t.t().contiguous().t() for t in (weight, first, second, grad))
                        rows = None if rows is None else rows.t().contiguous().t()
                    every = {"rows": None if rows is None else [rows], "keys": None if key is None else [key]}
                    options = {"dim": dim, "gather_grad": not has_rows, "step_size": 1e-4, **every}
                    keys = {"moment_keys": [5] if moments == torch.bfloat16 else None}
                    tensors = [[t] for t in (weight, indices, grad, first, second, ages)]
                    return lambda: kernels.compact_adamw_(*tensors, **options, **keys)

                size = r * (n if dim == 0 else m)
                case = f"{m}x{n} r={r} dim={dim} {name}"
                yield Case(kernel="compact_adamw", case=case, make=step, bytes=each * size, target=0.85)


if __name__ == "__main__":
    main("compact_adamw", cases, __doc__)
