"""Bandwidth of ``gather_rows`` and ``gather_cols``: python scripts/bench/kernels/gather_rows.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

from harness import TOKENS, Case, main, operands, picked, randn

from grass import kernels


def cases() -> Iterator[Case]:
    for (m, n), r in operands():

        def rows(m: int = m, n: int = n, r: int = r):
            x, indices = randn(m, n), picked(m, r)
            return lambda: kernels.gather_rows(x, indices)

        def cols(n: int = n, r: int = r):
            x, indices = randn(TOKENS, n), picked(n, r)
            return lambda: kernels.gather_cols(x, indices)

        yield Case(kernel="gather_rows", case=f"{m}x{n} r={r} bf16", make=rows, bytes=4 * r * n, target=0.85)
        moved = TOKENS * (min(32 * r, 2 * n) + 2 * r)  # whole sectors
        yield Case(kernel="gather_cols", case=f"{TOKENS}x{n} r={r} bf16", make=cols, bytes=moved)


if __name__ == "__main__":
    main("gather_rows", cases, __doc__)
