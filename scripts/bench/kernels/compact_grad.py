"""Matrix rate of ``compact_grad`` and of its kernel: python scripts/bench/kernels/compact_grad.py [--smoke]."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from harness import RANKS, SHAPES, TOKENS, Case, main, picked, randn

from grass import kernels
from grass.kernels.compact_grad import transposed_product


def cases() -> Iterator[Case]:
    for m, n in SHAPES:
        for r in [*RANKS, 4 if RANKS == [4] else 16]:

            def chosen(m: int = m, n: int = n, r: int = r):
                g, x, indices = randn(TOKENS, m), randn(TOKENS, n), picked(m, r)
                return lambda: kernels.compact_grad(g, x, indices, 0)

            def kernel(m: int = m, n: int = n, r: int = r):
                g, x, indices = randn(TOKENS, m), randn(TOKENS, n), picked(m, r)
                if os.environ["GRASS_KERNELS"] == "torch":
                    return lambda: kernels.compact_grad(g, x, indices, 0)
                return lambda: transposed_product(g, x, indices, torch.bfloat16)

            def narrow(n: int = n, r: int = r):
                saved, x = randn(TOKENS, r), randn(TOKENS, n)
                return lambda: saved.t() @ x

            count = {"bytes": 2 * TOKENS * (m + n), "flops": 2 * TOKENS * r * n}
            target = 0.7 if r >= 256 else 0.0
            shape = f"{TOKENS} tokens {m}x{n} r={r} bf16"
            yield Case(kernel="compact_grad", case=f"{shape} as dispatched", make=chosen, target=target, **count)
            yield Case(kernel="compact_grad", case=f"{shape} fused gather", make=kernel, **count)
            yield Case(kernel="compact_grad", case=f"{shape} gathered in forward (dim=1)", make=narrow, **count)


if __name__ == "__main__":
    main("compact_grad", cases, __doc__)
