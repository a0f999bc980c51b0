"""Bandwidth of ``row_sketch``: python scripts/bench/kernels/row_sketch.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

from harness import SHAPES, TOKENS, Case, main, randn

from grass import kernels

SIZE = 32


def cases() -> Iterator[Case]:
    for m, n in SHAPES:

        def sketch(m: int = m, n: int = n):
            g, x, signs = randn(TOKENS, m), randn(TOKENS, n), randn(n, SIZE)
            return lambda: kernels.row_sketch(g, x, signs)

        case = f"{TOKENS} tokens {m}x{n} s={SIZE} bf16"
        moved = 2 * TOKENS * (m + n) + 2 * n * SIZE + 4 * m * SIZE
        yield Case(kernel="row_sketch", case=case, make=sketch, bytes=moved)


if __name__ == "__main__":
    main("row_sketch", cases, __doc__)
