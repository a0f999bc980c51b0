"""Bandwidth of ``move_factors``: python scripts/bench/kernels/move_factors.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from harness import Case, main, operands, picked, randn

from grass import kernels

# bytes per value of the selected rows, whether the gradient is compact, layout
VARIANTS = {
    "compact float32 gradient, columns contiguous": (12, True, True),
    "full bf16 gradient, rows contiguous": (10, False, False),
}


def cases() -> Iterator[Case]:
    for (m, n), r in operands():
        for dim in (0, 1):
            for name, (each, compact, contiguous) in VARIANTS.items():

                def factors(m=m, n=n, r=r, dim=dim, compact=compact, contiguous=contiguous):
                    shape = (r, n) if dim == 0 else (m, r)
                    first, second = randn(*shape, dtype=torch.float32), randn(*shape, dtype=torch.float32).square_()
                    grad = randn(*shape, dtype=torch.float32) if compact else randn(m, n)
                    if dim == 1 and contiguous:  # as compact mode holds them
                        first, second, grad = (t.t().contiguous().t() for t in (first, second, grad))
                    indices = None if compact else [picked((m, n)[dim], r)]
                    return lambda: kernels.move_factors([first], [second], [grad], 9.0, indices=indices, dim=dim)

                size = r * (n if dim == 0 else m)
                target = 0.85 if dim == 0 or contiguous else 0.0  # columns of a row-major gradient: whole sectors
                case = f"{m}x{n} r={r} dim={dim} {name}"
                yield Case(kernel="move_factors", case=case, make=factors, bytes=each * size, target=target)


if __name__ == "__main__":
    main("move_factors", cases, __doc__)
