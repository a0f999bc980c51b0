"""Matrix rate of ``compact_grad``: python scripts/bench/kernels/compact_grad.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

from harness import TOKENS, Case, main, operands, picked, randn

from grass import kernels


def cases() -> Iterator[Case]:
    for (m, n), r in operands():

        def chosen(m: int = m, n: int = n, r: int = r):
            g, x, indices = randn(TOKENS, m), randn(TOKENS, n), picked(m, r)
            return lambda: kernels.compact_grad(g, x, indices)

        def narrow(n: int = n, r: int = r):
            saved, x = randn(TOKENS, r), randn(TOKENS, n)
            return lambda: saved.t() @ x

        count = {"bytes": 2 * TOKENS * (m + n), "flops": 2 * TOKENS * r * n}
        shape = f"{TOKENS} tokens {m}x{n} r={r} bf16"
        yield Case(kernel="compact_grad", case=f"{shape} gathered in backward", make=chosen, target=0.7, **count)
        yield Case(kernel="compact_grad", case=f"{shape} gathered in forward (dim=1)", make=narrow, **count)


if __name__ == "__main__":
    main("compact_grad", cases, __doc__)
