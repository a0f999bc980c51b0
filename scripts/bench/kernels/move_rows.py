"""Bandwidth of ``move_rows_``: python scripts/bench/kernels/move_rows.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import DEVICE, Case, main, operands, picked, randn

from grass import kernels

# bytes per moved value, whether rows are a tensor of their own, key, layout
VARIANTS = {
    "float32 rows over bf16, columns contiguous": (14, True, 7, True),
    "bf16 weight, full bf16 gradient, stochastic rounding": (6, False, 7, False),
}


def cases() -> Iterator[Case]:
    for (m, n), q in operands():
        for dim in (0, 1):
            for name, (each, has_rows, key, contiguous) in VARIANTS.items():

                def move(m=m, n=n, q=q, dim=dim, has_rows=has_rows, key=key, contiguous=contiguous):
                    shape = (q, n) if dim == 0 else (m, q)
                    weight, indices = randn(m, n), picked((m, n)[dim], q)
                    rows = randn(*shape, dtype=torch.float32) if has_rows else None
                    grad = randn(*shape, dtype=torch.float32) if has_rows else randn(m, n)
                    if dim == 1 and contiguous:  # as compact mode holds them
                        weight, grad = (t.t().contiguous().t() for t in (weight, grad))
                        rows = None if rows is None else rows.t().contiguous().t()
                    factors, length = torch.rand((n, m)[dim], device=DEVICE), torch.ones((), device=DEVICE)
                    every = {"rows": None if rows is None else [rows], "keys": None if key is None else [key]}
                    options = {"dim": dim, "gather_grad": not has_rows, "step_size": 1e-4, **every}
                    tensors = [[t] for t in (weight, indices, grad, factors, length)]
                    return lambda: kernels.move_rows_(*tensors, **options)

                size = q * (n if dim == 0 else m)
                target = 0.85 if dim == 0 or contiguous else 0.0  # columns of a row-major weight: whole sectors
                case = f"{m}x{n} q={q} dim={dim} {name}"
                yield Case(kernel="move_rows", case=case, make=move, bytes=each * size, target=target)


if __name__ == "__main__":
    main("move_rows", cases, __doc__)
