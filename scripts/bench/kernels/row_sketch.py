"""Bandwidth of ``row_sketch``: python scripts/bench/kernels/row_sketch.py [--smoke]."""

from __future__ import annotations

from collections.abc import Iterator

from harness import SHAPES, TOKENS, Case, main, randn

from grass import kernels

SIZE = 32


def cases() -> Iterator[Case]:
    for m, n in SHAPES:
        for given in (False, True):

            def sketch(m: int = m, n: int = n, given: bool = given):
                g, x, signs = randn(TOKENS, m), randn(TOKENS, n), randn(n, SIZE) if given else None
                return lambda: kernels.row_sketch(g, x, signs, size=SIZE, key=kernels.make_key(3))

            case = f"{TOKENS} tokens {m}x{n} s={SIZE} bf16 {'given' if given else 'own'} signs"
            yield Case(kernel="row_sketch", case=case, make=sketch, bytes=2 * TOKENS * (m + n) + 4 * m * SIZE)


if __name__ == "__main__":
    main("row_sketch", cases, __doc__)
