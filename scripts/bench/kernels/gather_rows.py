"""Bandwidth of ``gather_rows`` and ``gather_cols``: python scripts/bench/kernels/gather_rows.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

from harness import TOKENS, Case, main, operands, picked, randn

from grass import kernels


def cases() -> Iterator[Case]:
    for (m, n), r in operands():

        def rows(m: int = m, n: int = n, r: int = r):
            x, indices, out = randn(m, n), picked(m, r), randn(r, n)
            return lambda: kernels.gather_rows(x, indices, out=out)

        def cols(n: int = n, r: int = r):
            x, indices, out = randn(TOKENS, n), picked(n, r), randn(TOKENS, r)
            return lambda: kernels.gather_cols(x, indices, out=out)

        yield Case(kernel="gather_rows", case=f"{m}x{n} r={r} bf16", make=rows, bytes=4 * r * n, target=0.85)
        moved = TOKENS * (min(32 * r, 2 * n) + 2 * r)  # whole sectors
        yield Case(kernel="gather_cols", case=f"{TOKENS}x{n} r={r} bf16", make=cols, bytes=moved)


if __name__ == "__main__":
    main("gather_rows", cases, __doc__)
